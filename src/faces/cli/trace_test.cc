// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/trace.h"

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/store/factory.h"
#include "core/trace/reader.h"
#include "core/trace/recorder.h"
#include "faces/cli/testing/launched.h"
#include "faces/cli/top/top_table.h"
#include "testing/scratch_folder.h"

namespace muster::cli::testing {
namespace {

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(TraceCommand, ChoicesThatContradictAreNamed) {
  for (const char* command : {"trace", "top"}) {
    const auto both = run({command, "--store", "localhost:1", "--dir", "/tmp"});
    EXPECT_EQ(both.code, 2);
    EXPECT_TRUE(has(both.err, "--store excludes --dir") || has(both.err, "--dir excludes --store"))
        << both.err;
  }
}

/// Two live ranks, of which one has been in a call for `waits`.
trace::JobTrace job_that_waits(std::chrono::nanoseconds waits) {
  trace::JobTrace job;
  for (int rank = 0; rank < 2; ++rank) {
    trace::RankTrace one;
    one.rank = rank;
    one.world_size = 2;
    one.life = trace::Life::running;
    const std::uint64_t started = rank == 0 ? 1 : 0;
    one.groups.push_back({"default", 2, rank, {0, 1}, started, 0});
    job.ranks.push_back(one);
  }
  trace::Record call;
  call.ticket = call.sequence = 1;
  call.start_ns = trace::wall_now_ns() - waits.count();
  call.name = "barrier";
  job.ranks[0].records.push_back(call);
  return job;
}

TEST(TraceCommand, WhoIsAMomentLateIsNotShownAsBehind) {
  const std::string mark = "Rank 1, behind</h2>";
  EXPECT_FALSE(has(timeline_page(job_that_waits(std::chrono::milliseconds(10))), mark));
  EXPECT_TRUE(has(timeline_page(job_that_waits(std::chrono::minutes(1))), mark));
  EXPECT_TRUE(
      has(top_table(job_that_waits(std::chrono::milliseconds(10))), "no rank is behind yet"));
}

// spec: J3.usage what is not understood is refused by every command, in one line that names it,
// with exit code 2
TEST(Commands, RefuseWhatTheyDoNotUnderstand) {
  struct Refused {
    std::vector<std::string> words;
    std::string names;
  };
  std::vector<Refused> refused = {{{"--version", "twice"}, "twice"},
                                  {{"help", "run"}, "run"},
                                  {{"dance"}, "dance"},
                                  {{"run", "--nproc-per-node", "many", "true"}, "many"},
                                  {{"run", "--nproc-per-node"}, "--nproc-per-node needs a value"},
                                  {{"trace", "--store"}, "--store needs a value"},
                                  {{"launch", "--dance", "true"}, "--dance"},
                                  {{"doctor", "--dance"}, "--dance"},
                                  {{"doctor", "nurse"}, "nurse"},
                                  {{"bench", "--ranks", "200"}, "128"},
                                  {{"bench", "--simulate", "--latency-us", "abc"}, "abc"},
                                  {{"bench", "--seconds", "abc"}, "abc"},
                                  {{"bench", "dance"}, "dance"},
                                  {{"bench", "p2p", "--dance"}, "--dance"},
                                  {{"bench", "floors", "--dance"}, "--dance"}};
  for (const char* command : {"trace", "top"}) {
    for (const char* option : {"--pid", "--wait", "--store"})
      refused.push_back({{command, option, "abc"}, "abc"});
    refused.push_back({{command, "--pid", "0"}, "\"0\" is not a whole number above 0"});
    refused.push_back(
        {{command, "--store", "localhost"}, "\"localhost\" has no port; write HOST:PORT"});
    refused.push_back({{command, "--dance"}, "--dance"});
  }
  for (const auto& [words, names] : refused) {
    const auto outcome = run(words);
    EXPECT_EQ(outcome.code, 2) << words[0] << "\n" << outcome.out << outcome.err;
    EXPECT_EQ(outcome.out, "") << words[0];
    const std::string first = outcome.err.substr(0, outcome.err.find('\n'));
    EXPECT_TRUE(has(first, names)) << outcome.err;
    EXPECT_LT(first.size(), 200u) << outcome.err;
  }
}

// spec: W3 `muster trace -o` writes through no link: what it leads to stays as it is
TEST(TraceCommand, WritesThroughNoLink) {
  const muster::testing::ScratchFolder folder;
  const auto recorder = trace::Recorder::create({"a job", 0, 1, 64, folder.file("run"), "job7"});
  ASSERT_TRUE(recorder.ok()) << recorder.status().message();
  const std::string precious = folder.file("precious");
  std::ofstream(precious) << "text";
  const auto traces = [&](const std::string& name) {
    return run({"trace", "--dir", folder.file("run"), "-o", folder.file(name)});
  };
  const auto well = traces("out");
  EXPECT_EQ(well.code, 0) << well.err;
  EXPECT_TRUE(has(contents(folder.file("out.html")), "<html"));
  std::filesystem::create_symlink(precious, folder.file("link.html"));
  std::filesystem::create_hard_link(precious, folder.file("hard.json"));
  for (const auto& [name, why] :
       {std::pair("link", "symbolic link"), std::pair("hard", "2 names")}) {
    const auto refused = traces(name);
    EXPECT_EQ(refused.code, 1);
    EXPECT_TRUE(has(refused.err, why)) << refused.err;
    EXPECT_EQ(contents(precious), "text");
  }
}

// spec: V4.json trace and top --json: the job, who is behind, and each rank's call
TEST(TraceCommand, IsJsonIfAsked) {
  using nlohmann::json;
  const auto text = report_json(job_that_waits(std::chrono::minutes(1)), {"a note"});
  EXPECT_EQ(text.find('\n'), text.size() - 1);
  const json job = json::parse(text, nullptr, false);
  ASSERT_TRUE(job.is_object()) << text;
  EXPECT_EQ(job["notes"], json({"a note"}));
  EXPECT_EQ(job["holdups"][0]["behind"], json::array({1})) << text;
  EXPECT_EQ(job["holdups"][0]["reason"], "not_entered");
  EXPECT_GE(job["holdups"][0]["seconds"], 60.0);
  EXPECT_EQ(job["ranks"][0]["in_flight"]["name"], "barrier");
  EXPECT_TRUE(job["ranks"][1]["in_flight"].is_null());
  EXPECT_EQ(job["ranks"][1]["process"], "running");

  const muster::testing::ScratchFolder folder;
  const auto recorder = trace::Recorder::create({"a job", 0, 1, 64, folder.file("run"), "job7"});
  ASSERT_TRUE(recorder.ok()) << recorder.status().message();
  for (std::vector<std::string> words : {std::vector<std::string>{"trace", "--json"},
                                         std::vector<std::string>{"top", "--once", "--json"}}) {
    words.insert(words.end(), {"--dir", folder.file("run")});
    const auto outcome = run(words);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    const json read = json::parse(outcome.out, nullptr, false);
    EXPECT_EQ(read.value("run_id", ""), "job7") << outcome.out;
    EXPECT_EQ(read.value("world_size", 0), 1) << outcome.out;
  }
}

TEST(TraceCommand, AStoreWithoutAJobSaysSo) {
  store::TcpStoreOptions served;
  served.host = "127.0.0.1";
  served.port = 0;
  served.is_server = true;
  const std::string secret = Secret::random_text();
  served.secret = Secret::given(secret);
  const auto store = store::make_tcp_store(served);
  ASSERT_TRUE(store.ok()) << store.status().message();
  const auto place = "127.0.0.1:" + std::to_string((*store)->port());
  const auto none = run({"top", "--once", "--store", place}, {{"MUSTER_SECRET", secret}});
  EXPECT_EQ(none.code, 1);
  EXPECT_TRUE(has(none.err, "no job that can be asked runs on this store")) << none.err;
  const auto refused =
      run({"top", "--once", "--store", place}, {{"MUSTER_SECRET", "a guess of an outsider"}});
  EXPECT_EQ(refused.code, 1);
  EXPECT_TRUE(has(refused.err, "secret")) << refused.err;
}

}  // namespace
}  // namespace muster::cli::testing
