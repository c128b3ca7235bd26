// SPDX-License-Identifier: BSD-3-Clause
#include "muster/spawn.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <iterator>

#include "core/group/testing/ranks.h"
#include "testing/limits.h"
#include "testing/reserved_port.h"

namespace muster {
namespace {

using testing::message_of;

/// An unused file name, for init and for what ranks leave behind.
std::string new_file(const std::string& name) {
  auto path =
      std::string(::testing::TempDir()) + "spawn_" + std::to_string(::getpid()) + "_" + name;
  ::unlink(path.c_str());
  return path;
}

void join_its_job(const std::string& file, int rank, int world_size) {
  init_process_group({.init_method = "file://" + file,
                      .timeout = muster::testing::kMustHappen,
                      .world_size = world_size,
                      .rank = rank});
}

// spec: J2.threads fn(i, args...) in threads; J8 args default ()
TEST(Spawn, ThreadsGetRankAndArguments) {
  std::array<std::atomic<int>, 3> seen{};
  const auto process = ::getpid();
  spawn(
      [&](int i, int factor, const std::string& text) {
        EXPECT_EQ(::getpid(), process);
        seen.at(static_cast<std::size_t>(i)) = (i + 1) * factor + static_cast<int>(text.size());
      },
      std::tuple(10, std::string("ab")), {.nprocs = 3, .mode = SpawnMode::threads});
  EXPECT_EQ(seen[0], 12);
  EXPECT_EQ(seen[1], 22);
  EXPECT_EQ(seen[2], 32);
  int calls = 0;
  spawn([&](int i) { calls += 1 + i; }, {.mode = SpawnMode::threads});
  EXPECT_EQ(calls, 1);
}

std::size_t entries_of(const char* folder) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder),
                                                std::filesystem::directory_iterator()));
}

// spec: B10 E3 after destroy nothing of the job is left, even if a Work is kept
TEST(Spawn, AWorkThatIsKeptKeepsNoConnectionsAndNoThreads) {
  std::array<WorkRef, 3> kept;
  const auto job = [&](int rank) {
    init_process_group();
    auto tensor = at::full({1}, rank, at::kInt);
    kept.at(static_cast<std::size_t>(rank)) = all_reduce(tensor, {.async_op = true});
    kept.at(static_cast<std::size_t>(rank))->wait();
    destroy_process_group();
  };
  spawn(job,
        {.nprocs = 3, .mode = SpawnMode::threads});  // descriptors a process opens once and keeps
  kept = {};
  const std::size_t files = entries_of("/proc/self/fd"), threads = entries_of("/proc/self/task");
  spawn(job, {.nprocs = 3, .mode = SpawnMode::threads});
  EXPECT_EQ(entries_of("/proc/self/fd"), files);
  EXPECT_EQ(entries_of("/proc/self/task"), threads);
  for (const auto& work : kept) {
    EXPECT_TRUE(work->is_success());
    EXPECT_EQ(work->result().at(0).item<int>(), 3);
  }
}

// spec: B10 J2 ranks that are threads know each other: init_process_group needs to be told nothing,
// again and again
TEST(Spawn, ThreadsMeetByThemselves) {
  std::atomic<int> sum{0};
  spawn(
      [&](int rank) {
        for (int turn = 0; turn < 3; ++turn) {
          init_process_group();
          EXPECT_EQ(get_rank(), rank);
          EXPECT_EQ(get_world_size(), 3);
          auto tensor = at::full({1}, rank, at::kInt);
          all_reduce(tensor);
          sum += tensor.item<int>();
          destroy_process_group();
        }
      },
      {.nprocs = 3, .mode = SpawnMode::threads});
  EXPECT_EQ(sum, 27);
}

// Synchronises ranks as threads in tests; a rank that fails early fails its test instead of hanging
// it.
TEST(Spawn, ARankThatFailsEndsTheWaitsOfOthersForIt) {
  testing::RankLatch never(1);
  EXPECT_HAS(message_of<SpawnError>([&] {
               spawn(
                   [&](int rank) {
                     if (rank == 0) throw std::runtime_error("it has lost its way");
                     never.wait();
                   },
                   {.nprocs = 3, .mode = SpawnMode::threads});
             }),
             "rank 0 (a thread) failed: it has lost its way");
}

// spec: J2.processes in processes, with arguments; F3 all_reduce between processes
TEST(Spawn, ProcessesTrainTogether) {
  const auto file = new_file("job");
  const auto context = spawn(
      [](int i, const std::string& path, int world_size) {
        join_its_job(path, i, world_size);
        auto tensor = torch::full({1000}, i + 1);
        all_reduce(tensor);
        if (!tensor.eq(10).all().item<bool>()) throw std::runtime_error("wrong sum");
        TensorList all(static_cast<std::size_t>(world_size));
        for (auto& pid : all) pid = torch::zeros({1}, torch::kInt64);
        all_gather(all, torch::tensor({static_cast<std::int64_t>(::getpid())}));
        for (int a = 0; a < world_size; ++a)
          for (int b = 0; b < a; ++b)
            if (torch::equal(all[a], all[b]))
              throw std::runtime_error("not processes of their own");
        destroy_process_group();
      },
      std::tuple(file, 4), {.nprocs = 4});
  EXPECT_EQ(context, nullptr);
}

// spec: J2.failure the first failure is rethrown with its rank and text, in processes
TEST(Spawn, ProcessFailureComesBackWithRankAndText) {
  const auto file = new_file("failing");
  try {
    spawn(
        [&](int i) {
          join_its_job(file, i, 3);
          if (i == 1) throw std::runtime_error("the data of rank one is bad");
          auto tensor = torch::zeros({4});
          for (;;) all_reduce(tensor);  // ended by rank 1's failure
        },
        {.nprocs = 3});
    ADD_FAILURE() << "threw nothing";
  } catch (const SpawnError& error) {
    EXPECT_HAS(error.what(), "the data of rank one is bad");
    EXPECT_HAS(error.what(), "1");
    EXPECT_EQ(error.ranks(), std::vector<int>{1});
  }
}

// The others wait for it without a limit, in threads with a store of the program's and in threads
// and processes over TCP; J2 a rank that fails before it has joined ends the others and is
// named
TEST(Spawn, FailureBeforeInitEndsTheOthers) {
  const auto store = std::make_shared<HashStore>();
  const auto address = "tcp://127.0.0.1:" + std::to_string(testing::reserve_port());
  for (const bool tcp : {false, true}) {
    for (const auto mode : {SpawnMode::threads, SpawnMode::processes}) {
      if (!tcp && mode == SpawnMode::processes) continue;
      try {
        spawn(
            [&](int i) {
              if (i == 1) throw std::runtime_error("rank one has no data");
              InitProcessGroupOptions options{
                  .timeout = std::chrono::hours(1), .world_size = 3, .rank = i};
              if (tcp) options.init_method = address;
              if (!tcp) options.store = store;
              init_process_group(options);
            },
            {.nprocs = 3, .mode = mode});
        ADD_FAILURE() << "threw nothing";
      } catch (const SpawnError& error) {
        EXPECT_HAS(error.what(), "rank one has no data");
        EXPECT_EQ(error.ranks(), std::vector<int>{1});
      }
    }
  }
}

// spec: J2 a process that is killed is named, and the others are ended
TEST(Spawn, KilledProcessIsNamed) {
  const auto began = steady_clock().now();
  try {
    spawn(
        [](int i) {
          if (i == 1) ::raise(SIGKILL);
          for (;;) ::pause();
        },
        {.nprocs = 2});
    ADD_FAILURE() << "threw nothing";
  } catch (const SpawnError& error) {
    EXPECT_EQ(error.ranks(), std::vector<int>{1});
    EXPECT_HAS(error.what(), "SIGKILL");
  }
  EXPECT_LT(steady_clock().now() - began, std::chrono::seconds(60));
}

// spec: J2.failure the first failure ends the others and is rethrown, in threads
TEST(Spawn, ThreadFailureEndsTheOthers) {
  const auto store = std::make_shared<HashStore>();
  try {
    spawn(
        [&](int i) {
          init_process_group({.timeout = muster::testing::kMustHappen,
                              .world_size = 3,
                              .rank = i,
                              .store = store});
          if (i == 2) throw std::runtime_error("rank two gives up");
          auto tensor = torch::zeros({4});
          for (;;) all_reduce(tensor);
        },
        {.nprocs = 3, .mode = SpawnMode::threads});
    ADD_FAILURE() << "threw nothing";
  } catch (const SpawnError& error) {
    EXPECT_HAS(error.what(), "rank two gives up");
    EXPECT_EQ(error.ranks(), std::vector<int>{2});
  }
}

// spec: J2.join join false returns at once, join with a timeout; J8 join defaults to True
TEST(Spawn, WithoutJoinThereIsSomethingToJoin) {
  for (const auto mode : {SpawnMode::processes, SpawnMode::threads}) {
    int gate[2];
    ASSERT_EQ(::pipe(gate), 0);
    const auto context = spawn(
        [&](int) {
          char byte;
          if (::read(gate[0], &byte, 1) != 1) throw std::runtime_error("the gate broke");
        },
        {.nprocs = 2, .join = false, .mode = mode});
    ASSERT_NE(context, nullptr);
    EXPECT_EQ(context->pids().size(), mode == SpawnMode::processes ? 2u : 0u);
    EXPECT_FALSE(context->join(std::chrono::milliseconds(20)));
    ASSERT_EQ(::write(gate[1], "go", 2), 2);
    EXPECT_TRUE(context->join());
    ::close(gate[0]);
    ::close(gate[1]);
  }
  EXPECT_TRUE(SpawnOptions{}.join);
  EXPECT_EQ(SpawnOptions{}.nprocs, 1);
  EXPECT_THROW(spawn([](int) {}, {.nprocs = 0}), DistError);
}

// spec: A10.lengths a list of interfaces whose length differs between ranks is a clear error at
// init
TEST(Init, InterfaceListsOfDifferentLengthsAreNamed) {
  const auto file = new_file("interfaces");
  spawn(
      [&](int i) {
        ::setenv("MUSTER_SOCKET_IFNAME", i == 0 ? "lo,lo" : "lo", 1);
        const auto said = message_of<DistError>([&] { join_its_job(file, i, 2); });
        if (said.find("2 network interfaces") == std::string::npos ||
            said.find("rank 1") == std::string::npos)
          throw std::runtime_error("said: " + said);
      },
      {.nprocs = 2});
}

// Every survivor's error names the dead process's rank, not the rank that failed first because of
// it.
TEST(Spawn, SurvivorsNameTheDeadRank) {
  const auto file = new_file("dying");
  spawn(
      [&](int i) {
        join_its_job(file, i, 4);
        auto tensor = torch::zeros({1000});
        all_reduce(tensor);
        if (i == 2) {
          if (::fork() == 0) ::raise(SIGKILL);
          int status;
          ::wait(&status);
        }
        all_reduce(tensor);  // the death of a rank's child is not the rank's
        destroy_process_group();
      },
      {.nprocs = 4});

  const auto again = new_file("dying_again");
  const auto report = new_file("report");
  try {
    spawn(
        [&](int i) {
          ::signal(SIGTERM, SIG_IGN);  // so that each rank can report before it ends
          join_its_job(again, i, 4);
          auto tensor = torch::zeros({1000});
          try {
            for (int round = 0;; ++round) {
              all_reduce(tensor);
              if (i == 2 && round == 3) ::raise(SIGKILL);
            }
          } catch (const DistError& error) {
            FileStore(report).append("culprits", error.ranks() == std::vector<int>{2} ? "y" : "n");
          }
        },
        {.nprocs = 4});
    ADD_FAILURE() << "threw nothing";
  } catch (const SpawnError& error) {
    EXPECT_EQ(error.ranks(), std::vector<int>{2});
  }
  FileStore read(report);
  read.set_timeout(std::chrono::seconds(10));
  EXPECT_EQ(read.get("culprits"), "yyy");
  ::unlink(report.c_str());
}

}  // namespace
}  // namespace muster
