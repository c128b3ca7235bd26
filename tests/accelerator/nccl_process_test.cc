// SPDX-License-Identifier: BSD-3-Clause
// Deaths of ranks on backend nccl: ranks as processes. A suite of its own, which ctest runs in a
// process of its own: it forks.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "nccl_ranks.h"
#include "testing/limits.h"
#include "testing/rank_processes.h"
#include "testing/reserved_port.h"

namespace muster::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr auto kProcessLimit = muster::testing::kMustHappen;

/// The result of `body`, or the text of its exception, which must not reach the forked test.
std::string reported(const std::function<std::string()>& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    return std::string("THREW ") + error.what();
  }
}

/// Ranks as processes, whose group uses nccl.
void join_as_process(int rank, int ranks, std::uint16_t port, Duration timeout) {
  use_standin();
  deferred::current_device = static_cast<c10::DeviceIndex>(rank);
  init_process_group({.backend = "cpu:native,deferred:nccl",
                      .init_method = "tcp://127.0.0.1:" + std::to_string(port),
                      .timeout = timeout,
                      .world_size = ranks,
                      .rank = rank});
}

// spec: A3 kill -9 of a rank: the others get a named error, live, and go on in a shrunk group; D7
// NCCL's communicator shrinks with it
TEST(NcclProcesses, AKilledRankIsNamedAndTheOthersGoOn) {
  const auto port = reserve_port();
  SharedCounter ready;
  RankProcesses ranks(3, [&](int rank) {
    return reported([&, rank]() -> std::string {
      join_as_process(rank, 3, port, muster::testing::kMustHappen);
      all_reduce(some(rank));
      ready.add(1);
      if (rank == 2) {
        for (;;) ::pause();
      }
      const auto text = told([&] { all_reduce(some(rank)); });
      const auto group = shrink_group({}, {});
      const auto tensor = deferred::on_device(torch::ones({2}), rank);
      all_reduce(tensor, {.group = group});
      const bool right = torch::equal(tensor.cpu(), torch::full({2}, 2.0));
      destroy_process_group();
      return text + (right ? " WENT ON" : " WRONG") + " after " +
             std::to_string(standin_calls("ncclCommInitRankConfig")) + " new communicators and " +
             std::to_string(standin_calls("ncclCommShrink")) + " shrunk";
    });
  });
  ASSERT_TRUE(ready.wait_for(3, kProcessLimit));
  ranks.kill(2, SIGKILL);
  const auto ends = ranks.join(kProcessLimit);
  for (int rank = 0; rank < 2; ++rank) {
    const auto& report = ends[static_cast<std::size_t>(rank)].report;
    EXPECT_HAS(report, "rank 2");
    EXPECT_HAS(report, "WENT ON after 1 new communicators and 1 shrunk");
  }
}

// spec: B4.env A6 ranks that count on other numbers of ids are named on both
TEST(NcclProcesses, OtherNumbersOfIdsAreNamed) {
  const auto port = reserve_port();
  RankProcesses ranks(2, [&](int rank) {
    return reported([&, rank]() -> std::string {
      if (rank == 1) ::setenv("TORCH_NCCL_RANKS_PER_ROOT", "1", 1);
      join_as_process(rank, 2, port, muster::testing::kMustHappen);
      const auto text = told([&] { all_reduce(some(rank)); });
      text_of([] { destroy_process_group(); });
      return text;
    });
  });
  for (const auto& end : ranks.join(kProcessLimit))
    EXPECT_HAS(end.report, "the number of NCCL's ids: 1 on rank 0, 2 on rank 1");
}

/// Messages in both directions, and then a call that the ranks do not agree on. Whether the
/// messages were right, and the error.
std::string exchange_and_fail(int rank) {
  const auto got = deferred::on_device(torch::zeros({4}), rank);
  for (const auto& work :
       batch_isend_irecv({{isend, some(rank), 1 - rank}, {irecv, got, 1 - rank}}))
    work->wait();
  const bool right = torch::equal(got.cpu(), values(1 - rank, {4}));
  const auto text = told([&] { all_reduce(deferred::on_device(torch::ones({4 + rank}), rank)); });
  return (right ? "RIGHT " : "WRONG ") + text;
}

// spec: B4.abort the communicators of a group are aborted as one, for NCCL ends an abort only when
// the other members abort too: two ranks do not wait for each other in different orders
TEST(NcclProcesses, AbortsDoNotWaitForEachOther) {
  const auto port = reserve_port();
  RankProcesses ranks(2, [&](int rank) {
    return reported([&, rank]() -> std::string {
      join_as_process(rank, 2, port, muster::testing::kMustHappen);
      const auto said = exchange_and_fail(rank);
      text_of([] { destroy_process_group(); });
      return said + " ENDED";
    });
  });
  for (const auto& end : ranks.join(kProcessLimit)) {
    EXPECT_HAS(end.report, "RIGHT");
    EXPECT_HAS(end.report, "made different calls");
    EXPECT_HAS(end.report, "ENDED");
  }
}

// spec: B4.abort a member that never aborts holds up the others for a few seconds only
TEST(NcclProcesses, AMemberThatNeverAbortsIsNotWaitedForForEver) {
  const auto port = reserve_port();
  SharedCounter ended;
  RankProcesses ranks(2, [&](int rank) {
    return reported([&, rank]() -> std::string {
      if (rank == 1) ::setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", 1);
      join_as_process(rank, 2, port, muster::testing::kMustHappen);
      const auto said = exchange_and_fail(rank);
      if (rank == 1)
        for (;;) ::pause();
      text_of([] { destroy_process_group(); });
      ended.add(1);
      return said + " ENDED";
    });
  });
  EXPECT_TRUE(ended.wait_for(1, kProcessLimit));
  ranks.kill(1, SIGKILL);
  EXPECT_HAS(ranks.join(kProcessLimit).front().report, "ENDED");
}

// spec: D7 a rank that is killed while it joins is named, and the group goes on without it
TEST(NcclProcesses, ADeathWhileGrowingIsNamed) {
  const auto port = reserve_port();
  SharedCounter joining;
  RankProcesses ranks(3, [&](int rank) {
    return reported([&, rank]() -> std::string {
      ::setenv("NCCL_STANDIN_GROW_ABSENT", "2", 1);
      join_as_process(rank, 3, port, muster::testing::kMustHappen);
      const auto pair = new_group({.ranks = std::vector<int>{0, 1}});
      if (rank < 2) all_reduce(some(rank), {.group = pair});
      std::thread watcher([&] {
        while (rank == 2 && standin_calls("ncclCommGrow") == 0) std::this_thread::yield();
        joining.add(1);
      });
      const auto text = text_of([&] { grow_group({0, 1, 2}, {.group = pair}); });
      watcher.join();
      const auto tensor = deferred::on_device(torch::ones({2}), rank);
      all_reduce(tensor, {.group = pair});
      const bool right = torch::equal(tensor.cpu(), torch::full({2}, 2.0));
      text_of([] { destroy_process_group(); });
      return text + (right ? " WENT ON" : " WRONG");
    });
  });
  ASSERT_TRUE(joining.wait_for(3, kProcessLimit));
  ranks.kill(2, SIGKILL);
  const auto ends = ranks.join(kProcessLimit);
  for (int rank = 0; rank < 2; ++rank) {
    const auto& report = ends[static_cast<std::size_t>(rank)].report;
    EXPECT_HAS(report, "rank 2");
    EXPECT_HAS(report, "WENT ON");
  }
}

// spec: D7 with a version of NCCL that cannot grow, all ranks of the grown group connect anew
TEST(NcclProcesses, AnOldVersionConnectsAnew) {
  const auto port = reserve_port();
  RankProcesses ranks(3, [&](int rank) {
    return reported([&, rank]() -> std::string {
      use_standin();
      ::setenv("MUSTER_NCCL_LIBRARY", NCCL_STANDIN_2_14, 1);
      join_as_process(rank, 3, port, muster::testing::kMustHappen);
      const auto pair = new_group({.ranks = std::vector<int>{0, 1}});
      if (rank < 2) all_reduce(some(rank), {.group = pair});
      const auto grown = grow_group({0, 1, 2}, {.group = pair});
      const auto tensor = deferred::on_device(torch::ones({2}), rank);
      all_reduce(tensor, {.group = grown});
      const bool right = torch::equal(tensor.cpu(), torch::full({2}, 3.0));
      destroy_process_group();
      return right ? "RIGHT" : "WRONG";
    });
  });
  for (const auto& end : ranks.join(kProcessLimit)) EXPECT_EQ(end.report, "RIGHT");
}

/// As a program that has set nothing: timeouts end the process.
void join_with_default_handling(int rank, int ranks, std::uint16_t port, Duration timeout) {
  use_standin();
  ::unsetenv("TORCH_NCCL_ASYNC_ERROR_HANDLING");
  join_as_process(rank, ranks, port, timeout);
}

bool ended_with_1(const RankEnd& end) {
  return end.report.empty() && WIFEXITED(end.wait_status) && WEXITSTATUS(end.wait_status) == 1;
}

// spec: B4.end at a timeout the collective is aborted and the process ends with a clear message, as
// what it goes on computing is wrong; a rank that has not timed out is told by its next call
TEST(NcclProcesses, ATimeoutEndsTheProcess) {
  const auto port = reserve_port();
  RankProcesses ranks(2, [&](int rank) {
    return reported([&, rank]() -> std::string {
      ::setenv("NCCL_STANDIN_HANG", "0:2", 1);
      join_with_default_handling(rank, 2, port, muster::testing::kMustHappen);
      all_reduce(some(rank));
      if (rank == 1) return told([&] { all_reduce(some(rank)); });
      all_reduce(some(rank), {.timeout = milliseconds(300)});  // returns; its result never comes
      for (;;) ::pause();
    });
  });
  const auto ends = ranks.join(kProcessLimit);
  EXPECT_TRUE(ended_with_1(ends[0])) << ends[0].report << ends[0].wait_status;
  EXPECT_HAS(ends[1].report, "rank 0");
}

/// Whether that process has ended, be it that nobody has waited for it yet.
bool has_ended(int process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return true;
  const auto name_end = text.rfind(')');
  return name_end != std::string::npos && name_end + 2 < text.size() && text[name_end + 2] == 'Z';
}

// spec: B4.end the rank that has timed out ends; the one that it waited for has computed nothing
// wrong, and lives
TEST(NcclProcesses, ALateRankLives) {
  const auto port = reserve_port();
  SharedCounter process;
  RankProcesses ranks(2, [&](int rank) {
    return reported([&, rank]() -> std::string {
      join_with_default_handling(rank, 2, port, muster::testing::kMustHappen);
      if (rank == 0) process.add(::getpid());
      all_reduce(some(rank));
      if (rank == 0) {
        all_reduce(some(rank), {.timeout = milliseconds(300)});
        for (;;) ::pause();
      }
      if (!comes_true([&] { return has_ended(process.value()); })) return "RANK 0 LIVES";
      return told([&] { all_reduce(some(rank)); }) + " LIVES";
    });
  });
  const auto ends = ranks.join(kProcessLimit);
  EXPECT_TRUE(ended_with_1(ends[0])) << ends[0].report << ends[0].wait_status;
  EXPECT_HAS(ends[1].report, "rank 1");
  EXPECT_HAS(ends[1].report, "LIVES");
}

// spec: B4.end so it does if NCCL keeps the thread that is to launch the message
TEST(NcclProcesses, ATimeoutEndsTheProcessWhoseThreadNcclKeeps) {
  const auto port = reserve_port();
  RankProcesses ranks(2, [&](int rank) {
    return reported([&, rank]() -> std::string {
      ::setenv("NCCL_STANDIN_KEPT", "0:1", 1);
      join_with_default_handling(rank, 2, port, muster::testing::kMustHappen);
      if (rank == 1) {
        irecv(some(1), {.src = 0});
        return told([&] { all_reduce(some(1)); });
      }
      isend(some(0), {.dst = 1, .timeout = milliseconds(300)});
      for (;;) ::pause();
    });
  });
  const auto ends = ranks.join(kProcessLimit);
  EXPECT_TRUE(ended_with_1(ends[0])) << ends[0].report << ends[0].wait_status;
  EXPECT_HAS(ends[1].report, "rank 0");
}

// spec: B4.abort a thread that NCCL keeps in a collective holds up neither the calls that other
// threads make on its group, nor destroy
TEST(NcclProcesses, AThreadThatNcclKeepsHoldsUpNoOther) {
  const auto port = reserve_port();
  RankProcesses ranks(2, [&](int rank) {
    return reported([&, rank]() -> std::string {
      ::setenv("NCCL_STANDIN_KEPT", "0:2", 1);
      join_as_process(rank, 2, port, muster::testing::kMustHappen);
      all_reduce(some(rank));
      if (rank == 0) {
        std::thread([group = default_group()] {
          const c10::DeviceGuard on(device_of(0));
          text_of([&] { all_reduce(some(0), {.group = group, .timeout = milliseconds(300)}); });
        }).detach();
        if (!comes_true([] { return kept_threads() == 1; })) return "NOT KEPT";
      }
      const auto text = told([&] { all_reduce(some(rank)); });
      text_of([] { destroy_process_group(); });
      return text + " ENDED";
    });
  });
  for (const auto& end : ranks.join(kProcessLimit)) {
    EXPECT_HAS(end.report, "NCCL had not carried it out within 300 ms");
    EXPECT_HAS(end.report, "ENDED");
  }
}

// spec: B4.end only a timeout does: other failures leave the process alive
TEST(NcclProcesses, OtherFailuresLeaveTheProcessAlive) {
  const auto port = reserve_port();
  RankProcesses ranks(2, [&](int rank) {
    return reported([&, rank]() -> std::string {
      join_with_default_handling(rank, 2, port, muster::testing::kMustHappen);
      const auto said = exchange_and_fail(rank);
      text_of([] { destroy_process_group(); });
      return said + " ENDED";
    });
  });
  for (const auto& end : ranks.join(kProcessLimit)) {
    EXPECT_HAS(end.report, "made different calls");
    EXPECT_HAS(end.report, "ENDED");
  }
}

// spec: B4.end with TORCH_NCCL_ASYNC_ERROR_HANDLING=1 the collective is aborted at the timeout and
// the process ends with a clear message
TEST(NcclProcesses, TheProcessEndsIfTheVariableSaysSo) {
  const auto port = reserve_port();
  RankProcesses ranks(2, [&](int rank) {
    return reported([&, rank]() -> std::string {
      ::setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", 1);
      ::setenv("NCCL_STANDIN_HANG", "0:2", 1);
      join_as_process(rank, 2, port, milliseconds(1000));
      all_reduce(some(rank));
      all_reduce(some(rank));
      for (;;) ::pause();
    });
  });
  for (const auto& end : ranks.join(kProcessLimit)) {
    EXPECT_EQ(end.report, "");
    EXPECT_TRUE(WIFEXITED(end.wait_status) && WEXITSTATUS(end.wait_status) == 1);
  }
}

}  // namespace
}  // namespace muster::testing
