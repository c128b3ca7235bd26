// SPDX-License-Identifier: BSD-3-Clause
// Errors of the other ranks when a process ends without destroy_process_group.
#include <sys/resource.h>

#include <cstdlib>
#include <stdexcept>
#include <thread>

#include "core/group/testing/ranks.h"
#include "testing/limits.h"
#include "testing/rank_processes.h"
#include "testing/scratch_folder.h"

namespace muster {
namespace {

using testing::RankProcesses;
using testing::ScratchFolder;
using testing::SharedCounter;

constexpr auto kLimit = muster::testing::kMustHappen;
constexpr auto kTimeout = std::chrono::seconds(300);  // the groups' timeout; must never be reached

/// Rank 2 of three runs `end` and the others `call`; returns the messages of the others' errors.
std::vector<std::string> survivors_of(const std::function<void()>& end,
                                      const std::function<void()>& call,
                                      const std::string& backend) {
  const ScratchFolder scratch;
  SharedCounter through;
  RankProcesses ranks(3, [&](int rank) -> std::string {
    const rlimit none{0, 0};
    ::setrlimit(RLIMIT_CORE, &none);
    init_process_group({.backend = backend,
                        .init_method = "file://" + scratch.file("meeting"),
                        .timeout = kTimeout,
                        .world_size = 3,
                        .rank = rank});
    all_reduce(torch::ones({4}));
    through.add(1);
    if (rank == 2 && !through.wait_for(3, kLimit)) return "the others do not come through init";
    if (rank == 2) end();
    try {
      call();
      return "fine";
    } catch (const DistError& error) {
      return (error.ranks() == std::vector<int>{2} ? "names rank 2: " : "names others: ") +
             std::string(error.what());
    }
  });
  const auto ends = ranks.join(kLimit);
  std::vector<std::string> said;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    EXPECT_FALSE(ends[rank].killed_at_the_limit) << "rank " << rank << " waits for rank 2";
    said.push_back(ends[rank].report);
  }
  return said;
}

void reduce_for_ever() {
  for (;;) all_reduce(torch::ones({4}));
}

void expect_told(const std::function<void()>& end, const std::string& reason) {
  for (const auto* backend : {"native", "tcp"}) {
    for (const auto& said : survivors_of(end, reduce_for_ever, backend)) {
      EXPECT_HAS(said, "names rank 2: ");
      EXPECT_HAS(said, reason);
    }
  }
}

// spec: H7 an uncaught exception appears in the other ranks' errors
TEST(ProcessEnd, AnUncaughtExceptionIsTold) {
  const auto end = [] { std::thread([] { throw std::runtime_error("the batch is bad"); }).join(); };
  expect_told(end, "rank 2 failed: std::runtime_error: the batch is bad");
}

// spec: H7 exit with a status other than 0
TEST(ProcessEnd, AnExitStatusIsTold) {
  expect_told([] { std::exit(3); },
              "rank 2 failed: its process ended with exit status 3 and had not called "
              "destroy_process_group");
}

// spec: H7 note_failure; the first reason counts
TEST(ProcessEnd, ANotedFailureIsTold) {
  const auto end = [] {
    note_failure("the batch is bad");
    note_failure("so was the next one");
    std::exit(1);
  };
  expect_told(end, "rank 2 failed: the batch is bad");
}

// spec: H7 a rank that just ends: a call that needs it says so at once
TEST(ProcessEnd, ACallThatNeedsAnEndedRankSaysSo) {
  expect_told([] { std::exit(0); },
              "rank 2's process has ended, and called no destroy_process_group before");
}

// spec: B10 H a rank that just ends: the others may close their groups, and its earlier messages
// are delivered
TEST(ProcessEnd, OthersCloseTheirGroupsWithoutIt) {
  for (const auto* backend : {"native", "tcp"}) {
    const auto end = [] {
      auto last = at::full({4}, 7.0);
      broadcast(last, {.src = 2});
      std::exit(0);
    };
    const auto call = [] {
      auto last = torch::zeros({4});
      broadcast(last, {.src = 2});
      if (!last.eq(7).all().item<bool>()) throw DistError("the broadcast brought something else");
      destroy_process_group();
    };
    for (const auto& said : survivors_of(end, call, backend)) EXPECT_EQ(said, "fine");
  }
}

}  // namespace
}  // namespace muster
