// SPDX-License-Identifier: BSD-3-Clause
// The traces of real ranks: while they run, when one hangs, dies or stands still, and after their
// end.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <torch/types.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "core/trace/analysis.h"
#include "core/trace/run_directory.h"
#include "muster/distributed.h"
#include "testing/limits.h"
#include "testing/network_namespaces.h"
#include "testing/rank_processes.h"
#include "testing/reserved_port.h"
#include "testing/scratch_folder.h"

namespace muster::testing {
namespace {

constexpr auto kLimit = muster::testing::kMustHappen;
constexpr int kRanks = 4;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string contents(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

struct Output {
  int status;
  std::string text;
};

Output run(const std::string& command) {
  Output output{-1, {}};
  FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return output;
  char piece[4096];
  for (std::size_t got = 0; (got = ::fread(piece, 1, sizeof piece, pipe)) > 0;)
    output.text.append(piece, got);
  output.status = ::pclose(pipe);
  return output;
}

Output muster(const std::string& arguments) {
  return run(std::string(MUSTER_COMMAND) + " " + arguments);
}

/// The output of `command` once the wait that it is to show has become an unusually long one.
Output once_behind(const std::string& command) {
  const auto late = std::chrono::steady_clock::now() + muster::testing::kMustHappen;
  for (;;) {
    Output output = run(command);
    if (!has(output.text, "no rank is behind yet") || std::chrono::steady_clock::now() > late)
      return output;
  }
}

/// Blocks until a child has stopped (WSTOPPED) or ended (WEXITED), which is left for others to
/// collect.
bool has_changed(pid_t child, int how) {
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(child), &info, how | WNOWAIT) == 0;
}

class TraceProcesses : public ::testing::Test {
 protected:
  TraceProcesses() {
    ::mkdir(base_.c_str(), 0700);
    ::setenv("MUSTER_RUN_DIR", base_.c_str(), 1);
  }
  ~TraceProcesses() override { ::unsetenv("MUSTER_RUN_DIR"); }

  /// In a rank's process: joins the job and makes five all_reduces.
  void join(int rank) const {
    init_process_group({.timeout = kLimit,
                        .world_size = kRanks,
                        .rank = rank,
                        .store = std::make_shared<FileStore>(base_ + "/store", kRanks)});
    for (int i = 0; i < 5; ++i) all_reduce(torch::ones({4}));
  }
  const ScratchFolder folder_;
  const std::string base_ = folder_.file("run");
};

/// A rank's body whose exceptions are its report: out of a child they would run into the test
/// program's own frames.
std::function<std::string(int)> reporting(std::function<std::string(int)> body) {
  return [body = std::move(body)](int rank) -> std::string {
    try {
      return body(rank);
    } catch (const std::exception& error) {
      return std::string("threw: ") + error.what();
    }
  };
}

/// The text of the error of `call`; empty if there is none.
template <class Call>
std::string failure_of(Call call) {
  try {
    call();
  } catch (const DistError& error) {
    std::string text = "[";
    for (const int rank : error.ranks()) text += std::to_string(rank);
    return text + "] " + error.what();
  }
  return {};
}

// spec: F18 a skipped call is named at the deadline, by sequence numbers
TEST_F(TraceProcesses, ATimeoutNamesTheSleeperAndItsLastCall) {
  SharedCounter ready, over;
  const auto body = [&](int rank) -> std::string {
    join(rank);
    if (rank == 2) {
      over.wait_for(kRanks - 1, kLimit);
      return "slept";
    }
    ready.add(1);
    ready.wait_for(kRanks - 1, kLimit);
    auto text =
        failure_of([] { all_reduce(torch::ones({8}), {.timeout = std::chrono::seconds(3)}); });
    over.add(1);
    return text;  // leaves without destroy: its trace stays
  };
  RankProcesses ranks(kRanks, reporting(body));
  const auto ends = ranks.join(2 * kLimit);
  for (const int rank : {0, 1, 3}) {
    const auto& text = ends[static_cast<std::size_t>(rank)].report;
    EXPECT_TRUE(text.starts_with("[2] ")) << rank << ": " << text;
    EXPECT_TRUE(has(text, "rank 2 has not entered this call")) << text;
    EXPECT_TRUE(has(
        text,
        "rank 2's last call there is number 5, all_reduce of 16 bytes (float32 [4]), completed"))
        << text;
    EXPECT_TRUE(has(text, "call 6 of group 'default'")) << text;
    EXPECT_TRUE(has(text, "muster trace")) << text;
  }
  const auto remains = muster("trace --dir " + base_);
  EXPECT_EQ(remains.status, 0) << remains.text;
  EXPECT_TRUE(has(remains.text,
                  "rank 2 is behind: ranks 0, 1 and 3 are in call 6 of group 'default', all_reduce "
                  "of 32 bytes (float32 [8])"))
      << remains.text;
  EXPECT_TRUE(
      has(remains.text,
          "last: number 5, all_reduce of 16 bytes (float32 [4]), of group 'default', completed"))
      << remains.text;
}

// spec: F18 a skipped call is named at destroy
TEST_F(TraceProcesses, ASkippedLastCallIsNamedAtDestroy) {
  SharedCounter joined;
  const auto body = [&](int rank) -> std::string {
    join(rank);
    joined.add(1);  // nobody is still in the last common call when the first closes
    joined.wait_for(kRanks, kLimit);
    return failure_of([&] {
      if (rank != 2) barrier();
      destroy_process_group();
    });
  };
  RankProcesses ranks(kRanks, reporting(body));
  for (const auto& end : ranks.join(2 * kLimit)) {
    EXPECT_TRUE(end.report.starts_with("[2] ")) << end.report;
    EXPECT_TRUE(has(end.report, "rank 2 skipped a call")) << end.report;
    EXPECT_TRUE(has(end.report, "rank 2 closes group 'default' after 5 calls") ||
                has(end.report, "rank 2 made 5"))
        << end.report;
  }
  EXPECT_TRUE(has(muster("trace --dir " + base_).text, "rank 2 is behind"));
}

// spec: F18 a skipped call among identical ones is named at destroy
TEST_F(TraceProcesses, ACallSkippedAmongIdenticalOnesIsNamedAtDestroy) {
  const auto body = [&](int rank) -> std::string {
    join(rank);
    return failure_of([&] {
      for (int i = 0; i < 6; ++i)
        if (rank != 2 || i != 2) all_reduce(torch::ones({4}));
      destroy_process_group();
    });
  };
  RankProcesses ranks(kRanks, reporting(body));
  for (const auto& end : ranks.join(2 * kLimit)) {
    EXPECT_TRUE(end.report.starts_with("[2] ")) << end.report;
    EXPECT_TRUE(has(end.report, "rank 2 skipped a call")) << end.report;
    EXPECT_TRUE(has(end.report, "rank 2 closes group 'default' after 10 calls") ||
                has(end.report, "rank 2 made 10"))
        << end.report;
  }
  EXPECT_TRUE(has(muster("trace --dir " + base_).text, "rank 2 is behind"));
}

// spec: F18 between processes: one rank skips a call and makes another; every rank learns it long
// before the deadline, those that had returned at their next call, and both calls are named; so
// does what is left of the ranks
TEST_F(TraceProcesses, ARankThatSkipsACallAndMakesAnotherIsNamed) {
  SharedCounter joined;
  const auto body = [&](int rank) -> std::string {
    join(rank);
    joined.add(1);  // nobody is still in the last common call when the news comes
    joined.wait_for(kRanks, kLimit);
    const auto begin = steady_clock().now();
    auto text = failure_of([&] {
      if (rank != 2) all_reduce(torch::ones({4}));
      broadcast(torch::ones({8}), {.src = 0});
      barrier();
      barrier();
    });
    if (steady_clock().now() - begin > kLimit / 2) text += " TOO LATE";
    return text;
  };
  RankProcesses ranks(kRanks, reporting(body));
  for (const auto& end : ranks.join(2 * kLimit)) {
    EXPECT_TRUE(has(end.report.substr(0, end.report.find(']')), "2")) << end.report;
    EXPECT_TRUE(has(end.report, "the members of this group make different calls: as number 6, "))
        << end.report;
    EXPECT_TRUE(has(end.report, "called all_reduce(SUM, float32, 4 elements)")) << end.report;
    EXPECT_TRUE(has(end.report, "rank 2 called broadcast(float32, 8 elements, root 0)"))
        << end.report;
    EXPECT_FALSE(has(end.report, "TOO LATE")) << end.report;
  }
  const auto remains = muster("trace --dir " + base_);
  EXPECT_TRUE(remains.text.starts_with("rank 2 makes a different call: ")) << remains.text;
  EXPECT_TRUE(has(remains.text, "rank 2 called broadcast of 32 bytes (float32 [8]) as that number"))
      << remains.text;
}

/// The command line of `muster`, as somebody else's terminal has it: with a secret, and none of the
/// job's files in sight.
std::string from_elsewhere(const std::string& secret, const std::string& arguments) {
  return "MUSTER_SECRET='" + secret + "' MUSTER_RUN_DIR=/nowhere " + MUSTER_COMMAND + " " +
         arguments;
}
constexpr const char* kSecret = "the secret of this one job";

// Ranks of two hosts (0 and 1, 2 and 3: namespaces with folders of their own), and a terminal on
// the second.
TEST_F(TraceProcesses, ATerminalOnAnotherHostSeesEveryRankThroughTheStore) {
  const auto hosts = NetworkNamespaces::create(2);
  ASSERT_TRUE(hosts.ok()) << hosts.status().message();
  const auto port = std::to_string(reserve_port());
  const auto store = (*hosts)->address(0) + ":" + port;
  SharedCounter ready, over;
  const auto as_rank = [&](int rank) -> std::string {
    ::setenv("MUSTER_RUN_DIR", (base_ + "/host" + std::to_string(rank / 2)).c_str(), 1);
    ::setenv("MUSTER_SECRET", kSecret, 1);
    init_process_group(
        {.init_method = "tcp://" + store, .timeout = kLimit, .world_size = kRanks, .rank = rank});
    all_reduce(torch::ones({4}));
    WorkRef work;
    if (rank != 2) work = all_reduce(torch::ones({8}), {.async_op = true});
    ready.add(1);
    over.wait_for(1, 2 * kLimit);
    if (rank == 2) all_reduce(torch::ones({8}));
    if (work) work->wait();
    destroy_process_group();
    return "good";
  };
  const auto as_terminal = [&]() -> std::string {
    ready.wait_for(kRanks, kLimit);
    // The observers' key is enough to look.
    std::string key = run(from_elsewhere(kSecret, "secret --observer")).text;
    key.pop_back();
    const auto top = once_behind(from_elsewhere(key, "top --once --wait 60 --store " + store));
    const auto trace =
        run(from_elsewhere(key, "trace --wait 60 --store " + store + " -o " + base_ + "/asked"));
    const auto refused =
        run(from_elsewhere("some other secret, a guess", "top --once --store " + store));
    const auto doctor = run(from_elsewhere(key, "doctor --job " + store));
    over.add(1);
    return top.text + "----" + trace.text + "----" + (refused.status == 0 ? "LET IN " : "") +
           refused.text + (has(doctor.text, "by its store: 1;") ? "" : "NOT TOLD " + doctor.text);
  };
  const auto body = [&](int number) -> std::string {
    if (const auto moved = (*hosts)->enter(number < 2 ? 0 : 1); !moved) return moved.message();
    return number < kRanks ? as_rank(number) : as_terminal();
  };
  RankProcesses ranks(kRanks + 1, reporting(body));
  const auto ends = ranks.join(3 * kLimit);
  for (int rank = 0; rank < kRanks; ++rank)
    EXPECT_EQ(ends[static_cast<std::size_t>(rank)].report, "good");
  const auto& seen = ends[kRanks].report;
  const auto first = seen.find("----"), second = seen.find("----", first + 4);
  ASSERT_NE(second, std::string::npos) << seen;
  const auto top = seen.substr(0, first), trace = seen.substr(first, second - first),
             refused = seen.substr(second);
  const std::string behind =
      "rank 2 is behind: ranks 0, 1 and 3 are in call 2 of group 'default', all_reduce of 32 bytes "
      "(float32 [8])";
  EXPECT_TRUE(has(top, "4 ranks, 4 shown; " + behind)) << top;
  EXPECT_TRUE(
      has(top, "number 2, all_reduce of 32 bytes (float32 [8]), of group 'default', called"))
      << top;
  EXPECT_TRUE(has(trace, behind)) << trace;
  EXPECT_TRUE(has(trace, "rank 2, process " + std::to_string(ranks.pid(2)))) << trace;
  EXPECT_TRUE(has(contents(base_ + "/asked.html"), "Rank 2, behind</h2>"));
  EXPECT_TRUE(has(refused, "secret")) << refused;
  EXPECT_FALSE(has(refused, "LET IN")) << refused;
  EXPECT_FALSE(has(refused, "NOT TOLD")) << refused;
  EXPECT_FALSE(has(refused, "rank 2")) << refused;
}

// A stopped rank cannot answer: a rank of its host tells of it. If all ranks of a host are gone,
// the output says so.
TEST_F(TraceProcesses, OfAStoppedRankANeighbourTellsThroughTheStore) {
  const auto port = std::to_string(reserve_port());
  SharedCounter ready;
  const auto body = [&](int rank) -> std::string {
    ::setenv("MUSTER_RUN_DIR", (base_ + "/host" + std::to_string(rank / 2)).c_str(), 1);
    ::setenv("MUSTER_SECRET", kSecret, 1);
    init_process_group({.init_method = "tcp://127.0.0.1:" + port,
                        .timeout = kLimit,
                        .world_size = kRanks,
                        .rank = rank});
    barrier();
    ready.add(1);
    for (;;) ::pause();
  };
  RankProcesses ranks(kRanks, reporting(body));
  ASSERT_TRUE(ready.wait_for(kRanks, kLimit));
  ranks.kill(2, SIGSTOP);
  ASSERT_TRUE(has_changed(ranks.pid(2), WSTOPPED));
  const auto top = run(from_elsewhere(kSecret, "top --once --wait 8 --store 127.0.0.1:" + port));
  EXPECT_EQ(top.status, 0) << top.text;
  EXPECT_TRUE(has(top.text, "4 ranks, 4 shown")) << top.text;
  EXPECT_TRUE(has(top.text, std::to_string(ranks.pid(2)) + " stopped")) << top.text;
  EXPECT_TRUE(has(
      top.text,
      "rank 2 does not answer; what is shown was read from its file by another rank of its host"))
      << top.text;
  for (const int rank : {2, 3}) {
    ranks.kill(rank, SIGKILL);
    ASSERT_TRUE(has_changed(ranks.pid(rank), WEXITED));
  }
  const auto half = run(from_elsewhere(kSecret, "top --once --wait 8 --store 127.0.0.1:" + port));
  EXPECT_TRUE(has(half.text, "4 ranks, 2 shown")) << half.text;
  EXPECT_TRUE(has(half.text, "ranks 2 and 3 do not answer, and nothing else is known of them"))
      << half.text;
  ranks.kill(0, SIGKILL);
  ranks.kill(1, SIGKILL);
  ranks.join(2 * kLimit);
}

// One rank stands still before the call, one is killed in it; the headline names the first of them.
TEST_F(TraceProcesses, RemainsOfAKilledAndAStoppedRankNameTheSlowOne) {
  SharedCounter ready;
  const auto body = [&](int rank) -> std::string {
    join(rank);
    if (rank == 2) {
      ready.add(1);
      for (;;) ::pause();
    }
    return failure_of([&] {
      const auto work = all_reduce(torch::ones({4}), {.async_op = true});
      ready.add(1);
      work->wait();
    });
  };
  RankProcesses ranks(kRanks, reporting(body));
  ASSERT_TRUE(ready.wait_for(kRanks, kLimit));
  const auto live =
      once_behind(std::string(MUSTER_COMMAND) + " trace --pid " + std::to_string(ranks.pid(0)));
  EXPECT_TRUE(has(live.text, "rank 2 is behind: ranks 0, 1 and 3 are in call 6")) << live.text;
  const auto top = muster("top --once --pid " + std::to_string(ranks.pid(3)));
  EXPECT_EQ(top.status, 0);
  EXPECT_TRUE(has(top.text, "rank 2 is behind")) << top.text;
  EXPECT_TRUE(
      has(top.text, "number 6, all_reduce of 16 bytes (float32 [4]), of group 'default', called"))
      << top.text;

  ranks.kill(2, SIGSTOP);
  ASSERT_TRUE(has_changed(ranks.pid(2), WSTOPPED));
  ranks.kill(1, SIGKILL);
  ASSERT_TRUE(has_changed(ranks.pid(1), WEXITED));

  const std::string file = base_ + "/timeline";
  const auto remains = muster("trace --dir " + base_ + " --output " + file + ".json");
  EXPECT_EQ(remains.status, 0) << remains.text;
  EXPECT_TRUE(remains.text.starts_with("rank 2 is behind: ")) << remains.text;
  EXPECT_TRUE(has(remains.text, "rank 2, process " + std::to_string(ranks.pid(2)))) << remains.text;
  EXPECT_TRUE(has(remains.text, ", stopped: ")) << remains.text;
  EXPECT_TRUE(has(remains.text, ", gone: ")) << remains.text;

  const auto timeline = nlohmann::json::parse(contents(file + ".json"), nullptr, false);
  ASSERT_FALSE(timeline.is_discarded());
  int calls_of_2 = 0, open_calls = 0;
  for (const auto& event : timeline["traceEvents"]) {
    if (event["ph"] != "X" || event["args"]["sequence"] == 0) continue;
    calls_of_2 += event["pid"] == 2;
    open_calls += event["args"]["state"] == "queued";
  }
  EXPECT_EQ(calls_of_2, 5);
  EXPECT_GE(open_calls, 1);  // the killed rank's; the survivors' may have failed by now
  const std::string page = contents(file + ".html");
  EXPECT_TRUE(has(page, "<h1 id=\"headline\">Rank 2 is behind: ")) << page.substr(0, 2000);
  EXPECT_TRUE(has(page, "Rank 2, behind</h2>"));
  EXPECT_FALSE(has(page, "http://"));
  EXPECT_FALSE(has(page, "https://"));
  ranks.kill(2, SIGKILL);
  ranks.join(2 * kLimit);
}

// The page of such a job, as a browser understands it.
TEST_F(TraceProcesses, ABrowserShowsTheSlowRanksName) {
  std::string browser;
  for (const char* name :
       {"chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"}) {
    if (browser.empty() && run(std::string("command -v ") + name + " > /dev/null").status == 0)
      browser = name;
  }
  if (browser.empty())
    GTEST_SKIP() << "no Chromium on the PATH (Debian: apt-get install chromium-headless-shell)";
  SharedCounter joined;
  const auto body = [&](int rank) -> std::string {
    join(rank);
    joined.add(1);
    joined.wait_for(kRanks, kLimit);
    if (rank == 2) return "left";
    return failure_of([] { all_reduce(torch::ones({4})); });
  };
  RankProcesses ranks(kRanks, reporting(body));
  ranks.join(2 * kLimit);
  const auto written = muster("trace --dir " + base_ + " -o " + base_ + "/page.html");
  ASSERT_EQ(written.status, 0) << written.text;
  const auto shown = run(
      "timeout 120 " + browser +
      " --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir=" + base_ +
      "/browser --dump-dom file://" + base_ + "/page.html 2>/dev/null");
  ASSERT_EQ(shown.status, 0) << shown.text;
  EXPECT_TRUE(has(shown.text, "<h1 id=\"headline\">Rank 2 is behind: "))
      << shown.text.substr(0, 2000);
  EXPECT_TRUE(has(shown.text, "</rect>"));  // parsed, bars and all
}

TEST_F(TraceProcesses, EveryKindOfCallIsRecordedAndAGoodEndLeavesNothing) {
  const auto body = [&](int rank) -> std::string {
    join(rank);
    std::string text;
    const auto mine = [&] {
      const auto directory = trace::find_job_of(base_, ::getpid());
      return trace::read_trace(*directory + "/" + trace::trace_name(rank));
    };
    auto work = all_reduce(torch::ones({2, 3}, torch::kDouble), {.async_op = true});
    work->wait();
    if (rank == 0) isend(torch::ones({2}), {.dst = 1, .tag = 9})->wait();
    if (rank == 1) recv(torch::ones({2}), {.src = 0, .tag = 9});
    try {  // a refused call takes a number and leaves no record
      broadcast(torch::ones({2}), {.src = 99});
    } catch (const DistError&) {
    }
    broadcast(torch::ones({2}), {.src = 3});
    const auto trace = mine();
    if (!trace) return trace.status().message();
    for (const auto& record : trace->records) {
      text += trace::describe(record) + " " + std::to_string(record.sequence) + " " +
              std::to_string(record.peer) + " " + std::to_string(record.tag) +
              (record.async ? " async" : "") +
              (record.state == trace::State::completed ? " completed" : " open") + "\n";
    }
    destroy_process_group();
    return text;
  };
  RankProcesses ranks(kRanks, reporting(body));
  const auto ends = ranks.join(2 * kLimit);
  EXPECT_TRUE(has(ends[0].report, "all_reduce of 16 bytes (float32 [4]) 5 -1 0 completed"))
      << ends[0].report;
  EXPECT_TRUE(has(ends[0].report, "all_reduce of 48 bytes (float64 [2, 3]) 6 -1 0 async completed"))
      << ends[0].report;
  EXPECT_TRUE(has(ends[0].report, "isend of 8 bytes (float32 [2]) 0 1 9 async completed"))
      << ends[0].report;
  EXPECT_TRUE(has(ends[1].report, "recv of 8 bytes (float32 [2]) 0 0 9 completed"))
      << ends[1].report;
  EXPECT_TRUE(has(ends[2].report, "broadcast of 8 bytes (float32 [2]) 8 3 0 completed"))
      << ends[2].report;
  EXPECT_TRUE(trace::list_jobs(base_).empty());
  const auto nothing = muster("trace --dir " + base_);
  EXPECT_NE(nothing.status, 0);
  EXPECT_TRUE(has(nothing.text, "there are no traces in " + base_)) << nothing.text;
}

TEST_F(TraceProcesses, ZeroEntriesKeepNothing) {
  ::setenv("MUSTER_TRACE_ENTRIES", "0", 1);
  const auto body = [&](int rank) -> std::string {
    join(rank);
    const std::string found = trace::list_jobs(base_).empty() ? "none" : "some";
    destroy_process_group();
    return found;
  };
  RankProcesses ranks(kRanks, reporting(body));
  for (const auto& end : ranks.join(2 * kLimit)) EXPECT_EQ(end.report, "none");
  ::unsetenv("MUSTER_TRACE_ENTRIES");
}

}  // namespace
}  // namespace muster::testing
