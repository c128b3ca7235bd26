// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/dash/dash_replies.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "core/trace/recorder.h"
#include "faces/cli/dash/timeline.h"
#include "faces/cli/testing/launched.h"
#include "testing/scratch_folder.h"

namespace muster::cli::testing {
namespace {

using muster::testing::ScratchFolder;
using nlohmann::json;

constexpr std::int64_t kSecondNs = 1'000'000'000;

/// Live ranks; all but the last have been in a call for a minute.
ShownJob job_behind_the_last(int ranks) {
  ShownJob shown;
  const std::int64_t now = trace::wall_now_ns();
  std::vector<int> members;
  for (int rank = 0; rank < ranks; ++rank) members.push_back(rank);
  for (int rank = 0; rank < ranks; ++rank) {
    trace::RankTrace one;
    one.rank = rank;
    one.world_size = ranks;
    one.pid = 1000 + rank;
    one.host = "node<0>";
    one.job = "a job";
    one.life = trace::Life::running;
    one.since_ns = now - 100 * kSecondNs;
    const bool last = rank == ranks - 1;
    one.groups.push_back({"<b>group</b>", ranks, rank, members, last ? 0u : 1u, 0});
    if (!last) {
      trace::Record call;
      call.ticket = call.sequence = 1;
      call.start_ns = now - 60 * kSecondNs;
      call.name = "barrier";
      one.records.push_back(call);
      one.calls = 1;
    }
    shown.job.ranks.push_back(one);
  }
  return shown;
}

DashReplies replies_of(ShownJob shown, DashPlaces places = {}) {
  return {std::make_shared<DashJob>([shown] { return Result<ShownJob>(shown); }),
          std::move(places)};
}

/// The answer's object, and its status in "status".
json answer_to(DashReplies& replies, const std::string& path,
               std::map<std::string, std::string> parameters = {}) {
  const DashReply reply = replies.reply({path, std::move(parameters)});
  json read = json::parse(reply.body, nullptr, false);
  EXPECT_TRUE(read.is_object()) << path << reply.body;
  for (const char byte : reply.body) EXPECT_TRUE(byte == '\n' || byte >= ' ') << reply.body;
  read["status"] = reply.status;
  return read;
}

// spec: V8.ranks the state: each rank with what it does and for how long, who is behind and by how
// much
TEST(DashReplies, State) {
  auto replies = replies_of(job_behind_the_last(4));
  const json state = answer_to(replies, "/api/state");
  EXPECT_EQ(state["status"], 200);
  EXPECT_EQ(state["world_size"], 4);
  EXPECT_FALSE(state["over"].get<bool>());
  EXPECT_TRUE(state["headline"].get<std::string>().starts_with("rank 3 is behind")) << state;
  ASSERT_EQ(state["ranks"].size(), 4u);
  EXPECT_GE(state["ranks"][3]["behind_seconds"].get<double>(), 60.0);
  EXPECT_EQ(state["ranks"][0]["behind_seconds"], 0);
  EXPECT_EQ(state["ranks"][0]["in_flight"]["name"], "barrier");
  EXPECT_GE(state["ranks"][0]["in_flight"]["seconds"].get<double>(), 60.0);
  EXPECT_EQ(state["ranks"][0]["in_flight"]["group"], "<b>group</b>");
  for (const char* name : {"rank", "host", "pid", "process", "wait", "calls_per_second",
                           "bytes_per_second", "failures", "last_error", "last_call"})
    EXPECT_TRUE(state["ranks"][0].contains(name)) << name;
  for (const char* name : {"epoch", "restarts"}) EXPECT_TRUE(state[name].is_null()) << name;
  EXPECT_EQ(state["events"], json::array());
}

// spec: V8.timeline the timeline: a row per rank, each of as many columns as were asked for, at 512
// ranks too
TEST(DashReplies, Timeline) {
  auto replies = replies_of(job_behind_the_last(512));
  const json shown = answer_to(replies, "/api/timeline", {{"columns", "100"}});
  ASSERT_EQ(shown["ranks"].size(), 512u);
  EXPECT_EQ(shown["end_ns"].get<std::int64_t>() - shown["begin_ns"].get<std::int64_t>(),
            30 * kSecondNs);
  EXPECT_EQ(shown["ranks"][0]["columns"], std::string(100, 'w'));
  EXPECT_EQ(shown["ranks"][511]["columns"], std::string(100, '0'));
  for (const char* columns : {"0", "-1", "1201"})
    EXPECT_EQ(answer_to(replies, "/api/timeline", {{"columns", columns}})["status"], 400);
}

// spec: V8.timeline the timeline: shares of columns, calls that overlap, failures, and what is not
// known
TEST(DashReplies, TimelineColumns) {
  trace::RankTrace rank;
  rank.since_ns = 0;
  const auto add = [&](std::int64_t begin, std::int64_t end,
                       trace::State state = trace::State::completed) {
    trace::Record call;
    call.start_ns = begin * kSecondNs;
    call.end_ns = end * kSecondNs;
    call.state = state;
    rank.records.push_back(call);
    rank.calls = rank.records.size();
  };
  const TimelineSpan span{0, 10 * kSecondNs, 5};
  add(0, 2);
  add(0, 1);  // within the first
  add(5, 6);
  EXPECT_EQ(timeline_columns(rank, span, span.end_ns), "90500");
  add(6, 7, trace::State::failed);
  EXPECT_EQ(timeline_columns(rank, span, span.end_ns), "905x0");
  rank.calls += 1;  // one is forgotten: nothing is known before the first that is left
  rank.records.erase(rank.records.begin(), rank.records.begin() + 2);
  EXPECT_EQ(timeline_columns(rank, span, span.end_ns), "  5x0");
}

// spec: V8.ranks a rank's last calls and its failure; what does not exist is named
TEST(DashReplies, Rank) {
  ShownJob shown = job_behind_the_last(2);
  shown.job.ranks[0].failures = 1;
  shown.job.ranks[0].failure = "lost <script>";
  auto replies = replies_of(std::move(shown));
  const json rank = answer_to(replies, "/api/rank", {{"rank", "0"}});
  EXPECT_EQ(rank["pid"], 1000);
  EXPECT_EQ(rank["failure"], "lost <script>");
  ASSERT_EQ(rank["calls"].size(), 1u);
  EXPECT_TRUE(rank["calls"][0].get<std::string>().find("barrier") != std::string::npos);
  EXPECT_EQ(answer_to(replies, "/api/rank", {{"rank", "7"}})["status"], 404);
  for (const char* other : {"", "x", "1x", "99999999999999999999"})
    EXPECT_EQ(answer_to(replies, "/api/rank", {{"rank", other}})["status"], 400) << other;
  EXPECT_EQ(answer_to(replies, "/api/stacks")["status"], 400);
  EXPECT_EQ(answer_to(replies, "/api/none")["status"], 404);
}

// spec: V8.stacks stacks of a rank that is not of this host say where to look
TEST(DashReplies, StacksOfAnotherHost) {
  auto replies = replies_of(job_behind_the_last(2));
  const json read = answer_to(replies, "/api/stacks", {{"rank", "1"}});
  EXPECT_EQ(read["sections"], json::array());
  EXPECT_TRUE(read["notes"][0].get<std::string>().find("node<0>") != std::string::npos) << read;
}

// spec: V8.ended tails of logs: those of the folder alone, no link, no path out of it
TEST(DashReplies, Logs) {
  const ScratchFolder folder;
  const std::string below = folder.file("attempt_0/1");
  std::filesystem::create_directories(below);
  std::ofstream(below + "/stderr.log") << std::string(100'000, 'x') << "\nthe \x1b[31mend\n";
  std::ofstream(folder.file("secret.txt")) << "secret";
  std::filesystem::create_symlink("/etc/passwd", below + "/link.log");
  auto replies = replies_of(job_behind_the_last(2), {.logs = folder.path(), .events = {}});
  const json logs = answer_to(replies, "/api/logs");
  ASSERT_EQ(logs["logs"].size(), 1u) << logs;
  EXPECT_EQ(logs["logs"][0]["name"], "attempt_0/1/stderr.log");
  const json tail = answer_to(replies, "/api/log", {{"name", "attempt_0/1/stderr.log"}});
  const auto text = tail.value("text", "");
  EXPECT_TRUE(text.ends_with("x\nthe  [31mend\n")) << text.substr(text.size() - 40);
  EXPECT_EQ(text.size(), 65536u);
  for (const char* other : {"secret.txt", "../secret.txt", "/etc/passwd", "attempt_0/1/link.log",
                            "attempt_0/1/../1/stderr.log", ""})
    EXPECT_EQ(answer_to(replies, "/api/log", {{"name", other}})["status"], 404) << other;
  EXPECT_EQ(answer_to(replies, "/api/log")["status"], 400);
}

// spec: V8.ended epochs and restarts from the launcher's file of events, however it is damaged
TEST(DashReplies, Events) {
  const ScratchFolder folder;
  std::ofstream(folder.file("events.jsonl"))
      << "cut off\", \"event\": 1}\n"
      << R"({"time": "2026-11-27T08:00:00.123Z", "event": "workers_started", "epoch": 1,)"
      << R"( "restarts": 0})"
      << "\n[1]\n"
      << R"({"event": "worker_failed", "rank": 3, "error": "<b>"})"
      << "\n"
      << R"({"event": "workers_started", "epoch": 2, "restarts": 1})"
      << "\n"
      << R"({"event": "workers_started", "epoch": "many"})"
      << "\n"
      << R"({"event": "deep", "what": )" << std::string(1'000'000, '[')
      << std::string(1'000'000, ']') << "}\n{\"event\"";
  auto replies =
      replies_of(job_behind_the_last(2), {.logs = {}, .events = folder.file("events.jsonl")});
  const json state = answer_to(replies, "/api/state");
  EXPECT_EQ(state["epoch"], 2);
  EXPECT_EQ(state["restarts"], 1);
  ASSERT_EQ(state["events"].size(), 5u) << state["events"];
  EXPECT_EQ(state["events"][1]["error"], "<b>");
  EXPECT_EQ(state["events"][4]["event"], "deep");

  ::chmod(folder.file("events.jsonl").c_str(), 0666);
  const json refused = answer_to(replies, "/api/state");
  EXPECT_EQ(refused["events"], json::array());
  ASSERT_EQ(refused["notes"].size(), 1u) << refused;
}

// spec: V8.ended a process that takes a rank's place is an event, also without a file of events
TEST(DashReplies, ReplacedRanksAreEvents) {
  ShownJob shown = job_behind_the_last(2);
  ReplacedRanks replaced;
  replaced.look(shown.job);
  EXPECT_EQ(replaced.events(), json::array());
  shown.job.ranks[1].pid = 77;
  replaced.look(shown.job);
  replaced.look(shown.job);
  ASSERT_EQ(replaced.events().size(), 1u);
  EXPECT_EQ(replaced.events()[0]["event"], "rank_replaced");
  EXPECT_EQ(replaced.events()[0]["rank"], 1);
  EXPECT_EQ(replaced.events()[0]["pid"], 77);
}

// spec: V8.ended live and after the end: a job whose traces have gone is shown as it was last
TEST(DashReplies, KeepsTheLastLook) {
  const ScratchFolder folder;
  auto recorder = trace::Recorder::create({"a job", 0, 1, 64, folder.file("run"), "job7"});
  ASSERT_TRUE(recorder.ok()) << recorder.status().message();
  const std::string directory = (*recorder)->directory();
  DashJob job([&]() -> Result<ShownJob> {
    auto read = trace::read_job(directory);
    if (!read) return read.status();
    return ShownJob{std::move(*read), {}};
  });
  const auto first = job.latest();
  ASSERT_TRUE(first.ok()) << first.status().message();
  EXPECT_FALSE((*first)->over);
  EXPECT_EQ((*first)->shown.job.ranks.size(), 1u);
  const auto same = job.latest();  // within the second
  EXPECT_EQ(*same, *first);
  DashJob eager(
      [&]() -> Result<ShownJob> {
        auto read = trace::read_job(directory);
        if (!read) return read.status();
        return ShownJob{std::move(*read), {}};
      },
      Duration(0));
  EXPECT_FALSE((*eager.latest())->over);
  (*recorder)->remove();
  while (!(*eager.latest())->over) {
  }
  EXPECT_EQ((*eager.latest())->shown.job.ranks.size(), 1u);
  EXPECT_EQ((*eager.latest())->shown.notes.size(), 1u);

  DashJob none([]() -> Result<ShownJob> { return Status(Code::invalid_argument, "no job"); });
  EXPECT_FALSE(none.latest().ok());
  auto replies = DashReplies(std::make_shared<DashJob>([]() -> Result<ShownJob> {
                               return Status(Code::invalid_argument, "no job");
                             }),
                             {});
  EXPECT_EQ(answer_to(replies, "/api/state")["status"], 503);
}

// spec: V8.ended a job whose ranks all wait for the next epoch has not ended, and the end of one
// that was seen to live is told once
TEST(DashReplies, TellsOnceThatTheJobHasEnded) {
  ShownJob shown = job_behind_the_last(2);
  int told = 0;
  DashJob job([&] { return Result<ShownJob>(shown); }, Duration(0), [&] { ++told; });
  const auto look_at = [&](trace::Life life) {
    for (trace::RankTrace& rank : shown.job.ranks) rank.life = life;
    while ((*job.latest())->shown.job.ranks[0].life != life) {
    }
    return *job.latest();
  };
  EXPECT_FALSE(look_at(trace::Life::running)->over);
  EXPECT_FALSE(look_at(trace::Life::left)->over);
  EXPECT_EQ(told, 0);
  EXPECT_TRUE(look_at(trace::Life::gone)->over);
  EXPECT_EQ(told, 1);
  EXPECT_TRUE(look_at(trace::Life::gone)->over);
  EXPECT_EQ(told, 1);
  DashJob dead([&] { return Result<ShownJob>(shown); }, Duration(0), [&] { ++told; });
  EXPECT_TRUE((*dead.latest())->over);
  EXPECT_EQ(told, 1) << "it was over when the command began";
}

// spec: V8.ended a job that does not answer has not ended, and is shown as it was last
TEST(DashReplies, WaitsForAJobThatDoesNotAnswer) {
  bool answers = true;
  DashJob job(
      [&]() -> Result<ShownJob> {
        if (!answers) return Status(Code::timed_out, "the store is slow");
        return job_behind_the_last(2);
      },
      Duration(0));
  EXPECT_FALSE((*job.latest())->lost);
  answers = false;
  while (!(*job.latest())->lost) {
  }
  for (int look = 0; look < 3; ++look) {
    const auto lost = *job.latest();
    EXPECT_TRUE(lost->lost);
    EXPECT_FALSE(lost->over);
    EXPECT_EQ(lost->shown.job.ranks.size(), 2u);
    ASSERT_EQ(lost->shown.notes.size(), 1u);
    EXPECT_TRUE(contains(lost->shown.notes[0], "the store is slow")) << lost->shown.notes[0];
  }
  answers = true;
  while ((*job.latest())->lost) {
  }
  EXPECT_TRUE((*job.latest())->shown.notes.empty());
}

// spec: V8.ended a job that is started again writes another directory, and the page goes there
TEST(DashReplies, FollowsAJobThatStartsAgain) {
  const ScratchFolder folder;
  const std::string run = folder.file("run");
  const auto recorder_of = [&](const char* name, const char* run_id) {
    return trace::Recorder::create({name, 0, 1, 64, run, run_id});
  };
  CLI::App app;
  TraceChoice choice;
  choice.add_to(app, "folder");
  app.parse(std::vector<std::string>{run});
  const auto first = recorder_of("first", "job7");
  ASSERT_TRUE(first.ok()) << first.status().message();
  ASSERT_TRUE(choice.find(kAllRecords, true));
  const auto second = recorder_of("second", "job7"), other = recorder_of("other", "job8");
  EXPECT_EQ(choice.read_latest()->job.ranks[0].job, "first");
  (*first)->remove();
  const auto followed = choice.read_latest();
  ASSERT_TRUE(followed.ok()) << followed.status().message();
  EXPECT_EQ(followed->job.ranks[0].job, "second");
  (*second)->remove();
  EXPECT_FALSE(choice.read_latest().ok());  // not to another job
}

// spec: V8.page the command prints an address with a token, and names what it cannot show
TEST(DashCommand, PrintsTheAddress) {
  const ScratchFolder folder;
  const auto nothing = run({"dash", folder.path()});
  EXPECT_EQ(nothing.code, 1);
  EXPECT_TRUE(contains(nothing.err, folder.path())) << nothing.err;
  const auto both = run({"dash", folder.path(), "--pid", "1"});
  EXPECT_EQ(both.code, 2);
  if (MUSTER_HTTPLIB == 0) GTEST_SKIP() << "built without cpp-httplib";
  const auto recorder = trace::Recorder::create({"a job", 0, 1, 64, folder.file("run"), "job7"});
  ASSERT_TRUE(recorder.ok()) << recorder.status().message();
  Launched dash({"dash", folder.file("run")});
  ASSERT_TRUE(dash.wait_for_output("\n"));
  const std::string line = dash.take_output();
  EXPECT_TRUE(line.starts_with("muster dash: http://127.0.0.1:")) << line;
  EXPECT_EQ(line.substr(line.find('#') + 1).size(), 65u) << line;  // 64 digits and a newline
  dash.signal(SIGTERM);
  EXPECT_EQ(dash.finish().code, 128 + SIGTERM);
}

}  // namespace
}  // namespace muster::cli::testing
