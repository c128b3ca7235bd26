// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/spawn.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "core/base/threads/thread_start.h"
#include "jobs/launch/workers/process.h"
#include "testing/limits.h"

namespace muster::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

struct Shared {
  std::atomic<int> ran[8] = {};
  std::atomic<int> waiting = 0;
};

// A page that parent and children see.
Shared* shared_page() {
  void* page =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return new (page) Shared;
}

[[noreturn]] void wait_for_a_signal() {
  for (;;) ::pause();
}

// spec: J2 fn(i) in processes; J8 join is the default
TEST(SpawnProcesses, RunsTheBodyOnceForEveryRank) {
  Shared* page = shared_page();
  const pid_t parent = ::getpid();
  ASSERT_TRUE(spawn_processes(4, [&](int rank) {
                page->ran[rank].fetch_add(::getpid() == parent ? 100 : 1);
                return Status();
              }).ok());
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(page->ran[rank].load(), 1);
}

// spec: J2 the first failure ends the others and is rethrown with its rank and text
TEST(SpawnProcesses, TheFirstFailureEndsTheOthersAndIsReturnedWithRankAndText) {
  Shared* page = shared_page();
  const Status status = spawn_processes(3, [&](int rank) {
    if (rank != 1) {
      page->waiting.fetch_add(1);
      wait_for_a_signal();
    }
    while (page->waiting.load() < 2) ::sched_yield();
    return Status(Code::mismatch, "the shapes differ");
  });
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.code(), Code::mismatch);
  EXPECT_EQ(status.ranks(), std::vector{1});
  EXPECT_NE(status.message().find("rank 1 (process "), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("the shapes differ"), std::string::npos) << status.message();
}

// Rank 0 fails last, but the others have only followed it.
// spec: J2 the first failure is rethrown: a rank that others blame, not one that fails because of
// it
TEST(SpawnProcesses, TheRankThatOthersBlameIsTheCause) {
  Shared* page = shared_page();
  const Status status = spawn_processes(3, [&](int rank) {
    if (rank == 0) {
      // Ended by no signal: the report of rank 2 is there, and its process gone or going.
      while (page->waiting.load() < 2) ::sched_yield();
      return Status(Code::invalid_argument, "the data is bad");
    }
    page->waiting.fetch_add(1);
    return Status(Code::peer_failed, "rank " + std::to_string(rank - 1) + " has left", {rank - 1});
  });
  EXPECT_EQ(status.code(), Code::invalid_argument) << status.message();
  EXPECT_NE(status.message().find("the data is bad"), std::string::npos) << status.message();
  EXPECT_EQ(status.ranks(), std::vector{0});
}

// spec: J2 a long text comes through whole, and the ranks that it blames
TEST(SpawnProcesses, CarriesLongTextsAndBlamedRanks) {
  const std::string text(200000, 'x');
  const Status status = spawn_processes(1, [&](int) {
    return Status(Code::timed_out, text, {5, 6});
  });
  EXPECT_EQ(status.code(), Code::timed_out);
  EXPECT_EQ(status.ranks(), (std::vector{5, 6}));
  EXPECT_NE(status.message().find(text), std::string::npos);
}

// spec: J2 the first failure, a death by signal, is told with its rank
TEST(SpawnProcesses, NamesTheSignalThatEndedARank) {
  const Status status = spawn_processes(2, [&](int rank) {
    if (rank == 1) ::raise(SIGKILL);
    wait_for_a_signal();
    return Status();
  });
  EXPECT_EQ(status.code(), Code::peer_failed);
  EXPECT_EQ(status.ranks(), std::vector{1});
  EXPECT_NE(status.message().find("SIGKILL"), std::string::npos) << status.message();
}

// spec: J2 the first failure ends the others, those that ignore SIGTERM too
TEST(SpawnProcesses, KillsThoseThatIgnoreTerm) {
  Shared* page = shared_page();
  const Status status = spawn_processes(2,
                                        [&](int rank) {
                                          if (rank == 0) {
                                            ::signal(SIGTERM, SIG_IGN);
                                            page->waiting.fetch_add(1);
                                            wait_for_a_signal();
                                          }
                                          while (page->waiting.load() < 1) ::sched_yield();
                                          return Status(Code::internal, "over");
                                        },
                                        {.shutdown_timeout = milliseconds(50)});
  EXPECT_EQ(status.ranks(), std::vector{1});
}

// spec: J2 join: False gives a handle with pids, kill, and join with a timeout
TEST(SpawnProcesses, AHandleJoinsLater) {
  auto spawned = start_processes(2, [](int) -> Status { wait_for_a_signal(); });
  ASSERT_TRUE(spawned.ok());
  ASSERT_EQ(spawned->pids().size(), 2u);
  auto still = spawned->join(milliseconds(1));
  ASSERT_TRUE(still.ok());
  EXPECT_FALSE(*still);
  spawned->kill(SIGINT);
  const auto ended = spawned->join(muster::testing::kMustHappen);
  ASSERT_FALSE(ended.ok());
  EXPECT_NE(ended.status().message().find("SIGINT"), std::string::npos) << ended.status().message();
  EXPECT_EQ(spawned->join().status().message(), ended.status().message());
}

// spec: J2 processes do not outlive the handle
TEST(SpawnProcesses, DroppingTheHandleEndsThem) {
  pid_t pid = 0;
  {
    auto spawned = start_processes(1, [](int) -> Status { wait_for_a_signal(); });
    ASSERT_TRUE(spawned.ok());
    pid = spawned->pids()[0];
    EXPECT_EQ(::kill(pid, 0), 0);
  }
  EXPECT_EQ(::kill(pid, 0), -1);
}

// spec: J2 processes die with their parent
TEST(SpawnProcesses, TheyDieWithTheirParent) {
  int pipe_ends[2];
  ASSERT_EQ(::pipe(pipe_ends), 0);
  auto outer = start_processes(1, [&](int) {
    return spawn_processes(1, [&](int) -> Status {
      [[maybe_unused]] const ssize_t written = ::write(pipe_ends[1], "x", 1);
      wait_for_a_signal();
    });
  });
  ASSERT_TRUE(outer.ok());
  ::close(pipe_ends[1]);
  char byte = 0;
  ASSERT_EQ(::read(pipe_ends[0], &byte, 1), 1);  // the grandchild runs
  outer->kill(SIGKILL);
  // Its end of the pipe closes only when it dies.
  EXPECT_EQ(::read(pipe_ends[0], &byte, 1), 0);
  ::close(pipe_ends[0]);
}

// spec: J2 a number of processes that makes no sense is refused
TEST(SpawnProcesses, RefusesNone) {
  EXPECT_EQ(spawn_processes(0, [](int) { return Status(); }).code(), Code::invalid_argument);
}

// spec: J2 fn(i) in threads of this process
TEST(SpawnThreads, RunsTheBodyOnceForEveryRank) {
  std::atomic<int> ran[4] = {};
  ASSERT_TRUE(spawn_threads(4, [&](int rank) {
                ran[rank].fetch_add(1);
                return Status();
              }).ok());
  for (auto& count : ran) EXPECT_EQ(count.load(), 1);
}

// spec: J2 in threads the first failure is returned with its rank and text, and the caller is told
// in time to end the others
TEST(SpawnThreads, TheFirstFailureIsToldAtOnce) {
  std::atomic<bool> stop = false;
  const Status status = spawn_threads(3,
                                      [&](int rank) {
                                        if (rank == 2) return Status(Code::store, "no such key");
                                        while (!stop) std::this_thread::yield();
                                        return Status(Code::aborted, "stopped");
                                      },
                                      {.on_first_failure = [&](int rank, const Status& first) {
                                        EXPECT_EQ(rank, 2);
                                        EXPECT_EQ(first.ranks(), std::vector{2});
                                        stop = true;
                                      }});
  EXPECT_EQ(status.code(), Code::store);
  EXPECT_EQ(status.ranks(), std::vector{2});
  EXPECT_NE(status.message().find("rank 2"), std::string::npos);
  EXPECT_NE(status.message().find("no such key"), std::string::npos);
}

// spec: J2 threads that are ranks run the user's code, with the program's signals
TEST(SpawnThreads, RanksHaveTheSignalsOfTheProgram) {
  const auto blocks_sigterm = [] {
    sigset_t now;
    pthread_sigmask(SIG_SETMASK, nullptr, &now);
    return sigismember(&now, SIGTERM) == 1;
  };
  std::atomic<int> blocked_in_body = 0, blocked_at_end = 0;
  ASSERT_TRUE(spawn_threads(2,
                            [&](int) {
                              blocked_in_body += blocks_sigterm();
                              return Status();
                            },
                            {.at_end = [&](int) { blocked_at_end += blocks_sigterm(); }})
                  .ok());
  EXPECT_EQ(blocked_in_body, 0);
  EXPECT_EQ(blocked_at_end, 2) << "ending a rank is the engine's own work";
}

// spec: J2 a rank whose thread the system refuses is a failure by its number
TEST(SpawnThreads, ARefusedThreadIsTheFailureOfItsRank) {
  const NoNewThreads refused;
  bool ran = false;
  const Status status = spawn_threads(2, [&](int) {
    ran = true;
    return Status();
  });
  EXPECT_EQ(status.code(), Code::exhausted);
  EXPECT_EQ(status.ranks(), std::vector{0});
  EXPECT_NE(status.message().find("the thread of rank 0"), std::string::npos) << status.message();
  EXPECT_FALSE(ran);
}

}  // namespace
}  // namespace muster::launch
