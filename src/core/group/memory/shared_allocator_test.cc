// SPDX-License-Identifier: BSD-3-Clause
// The shared allocator: placement of ordinary tensors, equal results of every collective on shared
// and private tensors, and forks, threads, exhaustion and ranks that die or are late.
#include "core/group/memory/shared_allocator.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

#include "core/group/testing/ranks.h"
#include "testing/limits.h"
#include "testing/rank_processes.h"
#include "testing/seed.h"

namespace muster {
namespace {

using testing::on_ranks;
using testing::RankProcesses;
using testing::SharedCounter;
using testing::values;

constexpr auto kLimit = muster::testing::kMustHappen;
constexpr std::int64_t kMiB = 1 << 20;
constexpr std::size_t kMega = kMiB;

/// Enables the allocator for a scope.
class Sharing {
 public:
  explicit Sharing(const SharedAllocatorOptions& options = {}) { use_shared_allocator(options); }
  ~Sharing() { use_shared_allocator({.enabled = false}); }
  Sharing(const Sharing&) = delete;
};

at::Tensor bytes(std::int64_t count) { return at::empty({count}, at::kByte); }

/// An unused file name for a rendezvous.
std::string meeting_file() {
  static int made = 0;
  const auto path = std::string(::testing::TempDir()) + "shared_" + std::to_string(::getpid()) +
                    "_" + std::to_string(made++);
  ::unlink(path.c_str());
  return path;
}
void join_job(const std::string& file, int rank, int world_size, Duration timeout = kLimit) {
  at::set_num_threads(1);
  init_process_group({.init_method = "file://" + file,
                      .timeout = timeout,
                      .world_size = world_size,
                      .rank = rank,
                      .share_memory = true});
}

TEST(SharedAllocator, OrdinaryTensorsStandInTheArenaWhileItIsOn) {
  const auto before = bytes(kMiB);
  EXPECT_FALSE(shared_allocator_stats().enabled);
  const auto taken = shared_allocator_stats().bytes_in_use;
  {
    const Sharing on;
    EXPECT_TRUE(shared_allocator_stats().enabled);
    const auto large = bytes(kMiB), odd = bytes(100'001);
    EXPECT_TRUE(in_shared_memory(large));
    EXPECT_TRUE(in_shared_memory(odd));
    EXPECT_TRUE(in_shared_memory(torch::ones({200, 200}) * 2));
    EXPECT_TRUE(in_shared_memory(large.narrow(0, 5000, 10)));
    for (const auto& each : {large, odd})
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(each.data_ptr()) % 64, 0u);
    EXPECT_GE(shared_allocator_stats().bytes_in_use, taken + kMega + 100'001);
    EXPECT_GE(shared_allocator_stats().bytes_reserved, shared_allocator_stats().bytes_in_use);

    EXPECT_FALSE(in_shared_memory(before));
    EXPECT_FALSE(in_shared_memory(bytes(16)));
    EXPECT_FALSE(in_shared_memory(bytes(0)));
    EXPECT_FALSE(in_shared_memory(at::Tensor()));
    std::vector<float> own(100'000);
    EXPECT_FALSE(in_shared_memory(at::from_blob(own.data(), {100'000}, at::kFloat)));
    auto grown = bytes(16);
    grown.resize_({kMiB});
    EXPECT_TRUE(in_shared_memory(grown));
    use_shared_allocator({.private_up_to = 0});
    EXPECT_TRUE(in_shared_memory(bytes(16)));
  }
  EXPECT_FALSE(in_shared_memory(bytes(kMiB)));
  EXPECT_EQ(shared_allocator_stats().bytes_in_use, taken);
  trim_shared_allocator();
  EXPECT_LE(shared_allocator_stats().bytes_reserved, taken + kMega);
}

TEST(SharedAllocator, BelongsToInitProcessGroup) {
  const auto init = [](std::optional<bool> share_memory) {
    init_process_group({.world_size = 1,
                        .rank = 0,
                        .store = std::make_shared<HashStore>(),
                        .share_memory = share_memory});
    destroy_process_group();
    const bool on = shared_allocator_stats().enabled;
    use_shared_allocator({.enabled = false});
    return on;
  };
  EXPECT_FALSE(init({}));
  EXPECT_TRUE(init(true));
  ::setenv("MUSTER_SHARE_MEMORY", "1", 1);
  EXPECT_TRUE(init({}));
  EXPECT_FALSE(init(false));
  ::setenv("MUSTER_SHARE_MEMORY", "perhaps", 1);
  EXPECT_HAS(testing::message_of<DistError>([&] { init({}); }), "MUSTER_SHARE_MEMORY");
  ::unsetenv("MUSTER_SHARE_MEMORY");
  const Sharing on({.private_up_to = 5'000'000});
  init_process_group(
      {.world_size = 1, .rank = 0, .store = std::make_shared<HashStore>(), .share_memory = true});
  destroy_process_group();
  EXPECT_FALSE(in_shared_memory(bytes(kMiB))) << "the options that were given before are kept";
}

// For a reducer, whose gradients autograd allocates.
TEST(SharedAllocator, TensorsOfGivenSizesStandInTheArenaWhileAThreadSaysSo) {
  group::SharedSizes sizes({100'000, 50'000, 1000}), others({70'000});
  EXPECT_FALSE(in_shared_memory(bytes(50'000)));
  sizes.begin();
  EXPECT_TRUE(in_shared_memory(bytes(50'000)));
  EXPECT_TRUE(in_shared_memory(at::empty({25'000}, at::kFloat)));
  EXPECT_FALSE(in_shared_memory(bytes(50'001)));
  EXPECT_FALSE(in_shared_memory(bytes(1000))) << "what is small is copied anyway";
  EXPECT_FALSE(shared_allocator_stats().enabled);
  std::thread([] { EXPECT_FALSE(in_shared_memory(bytes(50'000))); }).join();
  others.begin();
  EXPECT_TRUE(in_shared_memory(bytes(70'000)));
  EXPECT_TRUE(in_shared_memory(bytes(50'000))) << "others began besides";
  std::thread([&] { others.end(); }).join();
  EXPECT_FALSE(in_shared_memory(bytes(70'000)));
  EXPECT_TRUE(in_shared_memory(bytes(50'000)));
  std::thread([&] {
    sizes.begin();
    EXPECT_TRUE(in_shared_memory(bytes(50'000)));
  }).join();
  EXPECT_FALSE(in_shared_memory(bytes(50'000))) << "it has begun elsewhere since";
  std::thread([] {  // the sizes outlive their owner while the thread uses them; AddressSanitizer
                    // would detect otherwise
    std::optional<group::SharedSizes> gone(std::in_place, std::vector<std::size_t>{60'000});
    gone->begin();
    gone.reset();
    EXPECT_FALSE(in_shared_memory(bytes(60'000)));
  })
      .join();
}

TEST(SharedAllocator, WhatWillBeMadeAgainIsKept) {
  SharedAllocatorOptions options{.keep = 0};
  const Sharing on(options);
  const auto returned_by = [] {
    const auto before = shared_allocator_stats().bytes_returned;
    bytes(4 * kMiB);
    return shared_allocator_stats().bytes_returned - before;
  };
  EXPECT_GE(returned_by(), 4 * kMega);
  {
    const group::SharedSizes sizes({4 * kMega});
    EXPECT_EQ(returned_by(), 0u);
  }
  use_shared_allocator(options);
  EXPECT_GE(returned_by(), 4 * kMega);
  use_shared_allocator();  // as other tests expect it
}

TEST(SharedAllocator, TheEnvironmentKeepsTensorsOfGivenSizesPrivate) {
  ::setenv("MUSTER_SHARE_MEMORY", "0", 1);
  group::SharedSizes sizes({100'000});
  ::unsetenv("MUSTER_SHARE_MEMORY");
  sizes.begin();
  EXPECT_FALSE(in_shared_memory(bytes(100'000)));
}

/// Runs every collective on newly created tensors of `elements` per rank; returns "" or the first
/// wrong result.
std::string play_all(int rank, int size, std::int64_t elements) {
  const auto mine = values(rank, {elements}), wide = values(rank, {elements * size});
  const auto sum = testing::reduced(size, {elements}, at::kFloat, ReduceOp::SUM);
  const auto wide_sum = testing::reduced(size, {elements * size}, at::kFloat, ReduceOp::SUM);
  std::string wrong;
  const auto expect = [&](const char* what, const at::Tensor& is, const at::Tensor& should) {
    if (!torch::equal(is, should))
      wrong += std::string(what) + " of " + std::to_string(elements) + " elements; ";
  };
  TensorList slices, filled;
  for (int r = 0; r < size; ++r) {
    slices.push_back(wide.narrow(0, r * elements, elements));
    filled.push_back(at::empty({elements}));
  }
  auto x = mine.clone();
  all_reduce(x);
  expect("all_reduce", x, sum);
  x = mine.clone();
  const auto work = all_reduce(x, {.async_op = true});
  work->wait();
  expect("all_reduce in the background", x, sum);
  x = mine.clone();
  reduce(x, {.dst = size - 1});
  expect("reduce", x, rank == size - 1 ? sum : mine);
  x = mine.clone();
  broadcast(x, {.src = size - 1});
  expect("broadcast", x, values(size - 1, {elements}));
  all_gather(filled, mine);
  for (int r = 0; r < size; ++r)
    expect("all_gather", filled[static_cast<std::size_t>(r)], values(r, {elements}));
  x = at::empty({elements});
  reduce_scatter(x, slices);
  expect("reduce_scatter", x, wide_sum.narrow(0, rank * elements, elements));
  all_to_all(filled, slices);
  for (int r = 0; r < size; ++r)
    expect("all_to_all", filled[static_cast<std::size_t>(r)],
           values(r, {elements * size}).narrow(0, rank * elements, elements));
  x = at::empty({elements});
  scatter(x, {.scatter_list = rank == 0 ? slices : TensorList{}, .src = 0});
  expect("scatter", x, values(0, {elements * size}).narrow(0, rank * elements, elements));
  gather(mine, {.gather_list = rank == 0 ? filled : TensorList{}, .dst = 0});
  for (int r = 0; rank == 0 && r < size; ++r)
    expect("gather", filled[static_cast<std::size_t>(r)], values(r, {elements}));
  return wrong;
}

// spec: F2 F3 F4 F5 F6 F7 F8 on ordinary tensors in shared memory, beside ranks whose tensors are
// private
TEST(SharedAllocator, EveryCollectiveBetweenProcesses) {
  struct Scene {
    bool read_only;
    int private_rank;  // rank with private tensors; -1: none
  };
  for (const auto& scene : {Scene{false, -1}, Scene{true, 2}}) {
    const auto file = meeting_file();
    RankProcesses ranks(3, [&](int rank) -> std::string {
      if (scene.read_only) use_shared_allocator({.read_only = true});
      join_job(file, rank, 3);
      if (rank == scene.private_rank) use_shared_allocator({.enabled = false});
      std::string wrong;
      for (const std::int64_t elements :
           {std::int64_t{3}, std::int64_t{20'000}, std::int64_t{300'001}})
        wrong += play_all(rank, 3, elements);
      const bool shared = in_shared_memory(bytes(kMiB));
      destroy_process_group();
      if (shared == (rank == scene.private_rank)) wrong += "tensors do not stand where they should";
      return wrong.empty() ? "done" : wrong;
    });
    for (const auto& end : ranks.join(kLimit)) EXPECT_EQ(end.report, "done");
  }
}

// spec: J2 ranks as threads, their ordinary tensors in one arena; two jobs in one process
TEST(SharedAllocator, EveryCollectiveBetweenThreads) {
  const Sharing on;
  for (int job = 0; job < 2; ++job) {
    on_ranks(2, [](int rank) { EXPECT_EQ(play_all(rank, 2, 100'000), ""); });
  }
}

// Sizes from zero to several MiB on several threads; each tensor is filled, then checked and freed
// on another thread; freed memory is returned.
TEST(SharedAllocator, ThreadsMakeAndDropTensors) {
  const auto taken = shared_allocator_stats().bytes_in_use;
  {
    const Sharing on({.limit = std::size_t{256} << 20, .keep = std::size_t{8} << 20});
    std::mutex lock;
    std::vector<std::pair<at::Tensor, std::uint8_t>> common;
    std::atomic<int> faults{0};
    std::vector<std::thread> threads;
    for (unsigned id = 0; id < 4; ++id) {
      threads.emplace_back([&, id] {
        std::mt19937_64 random(testing::test_seed() + id);
        for (int round = 0; round < 500; ++round) {
          const auto size =
              static_cast<std::int64_t>(random() % (random() % 20 == 0 ? 6'000'000 : 200'000));
          const auto mark = static_cast<std::uint8_t>(random());
          auto made = bytes(size);
          if (size > 0) std::memset(made.data_ptr(), mark, static_cast<std::size_t>(size));
          std::pair<at::Tensor, std::uint8_t> old;
          {
            const std::lock_guard hold(lock);
            common.emplace_back(std::move(made), mark);
            std::swap(common[random() % common.size()], common.back());
            if (common.size() < 60) continue;
            old = std::move(common.back());
            common.pop_back();
          }
          const auto* data = old.first.data_ptr<std::uint8_t>();
          for (std::int64_t at = 0; at < old.first.numel(); at += 997)
            faults += data[at] != old.second;
          if (old.first.numel() > 0) faults += data[old.first.numel() - 1] != old.second;
        }
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(faults, 0);
    EXPECT_GT(shared_allocator_stats().bytes_returned, 0u);
    EXPECT_LE(shared_allocator_stats().bytes_reserved, std::size_t{256} << 20);
  }
  EXPECT_EQ(shared_allocator_stats().bytes_in_use, taken);
  const Sharing defaults;
}

// A data loader's worker reads inherited tensors, writes to its own copies, and allocates
// privately.
TEST(SharedAllocator, ForkedChildAllocatesPrivately) {
  const Sharing on;
  auto inherited = torch::full({100'000}, 7);
  auto dropped = torch::full({100'000}, 8);
  const auto before = shared_allocator_stats();
  const pid_t child = ::fork();
  if (child == 0) {
    at::set_num_threads(1);  // torch's threads do not exist in the child
    at::Tensor made = at::empty({100'000}, at::kLong).fill_(3);
    const bool apart = !in_shared_memory(made) && !shared_allocator_stats().enabled;
    const bool readable = inherited.eq(7).all().item<bool>() && dropped.eq(8).all().item<bool>();
    inherited.fill_(9);
    const bool own_copy = (inherited + made).eq(12).all().item<bool>();
    dropped.reset();
    // A child that becomes a rank may create its own arena.
    use_shared_allocator();
    const bool again = in_shared_memory(at::empty({100'000}));
    made.reset();
    inherited.reset();
    ::_exit(apart && readable && own_copy && again ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(inherited.eq(7).all().item<bool>()) << "a child's write shows in its parent";
  EXPECT_TRUE(dropped.eq(8).all().item<bool>());
  EXPECT_EQ(shared_allocator_stats().bytes_in_use, before.bytes_in_use);
}

TEST(SharedAllocator, WithoutRoomTensorsArePrivate) {
  const auto taken = shared_allocator_stats().bytes_in_use;
  const Sharing on({.limit = taken + 8 * kMega});
  const auto before = shared_allocator_stats();
  TensorList all;
  int shared = 0;
  for (int i = 0; i < 6; ++i) {
    all.push_back(bytes(3 * kMiB).fill_(i));
    shared += in_shared_memory(all.back());
  }
  EXPECT_EQ(shared, 2);
  EXPECT_EQ(shared_allocator_stats().fallbacks, before.fallbacks + 4);
  EXPECT_LE(shared_allocator_stats().bytes_reserved, shared_allocator_stats().limit);
  for (int i = 0; i < 6; ++i)
    EXPECT_TRUE(all[static_cast<std::size_t>(i)].eq(i).all().item<bool>());
  // Exhausting all memory is torch's usual error.
  EXPECT_ANY_THROW(bytes(std::int64_t{1} << 50));
  all.clear();
  EXPECT_TRUE(in_shared_memory(bytes(6 * kMiB))) << "there is room again";
  use_shared_allocator();
}

/// Reduces newly created tensors each round until a call fails; returns the rank the failure names,
/// or what went wrong.
std::string reduce_until_failure(int size, SharedCounter& rounds) {
  for (;;) {
    auto x = torch::ones({kMiB / 2});
    try {
      all_reduce(x);
    } catch (const DistError& error) {
      // The failed call's memory is reused immediately.
      x = torch::full({kMiB / 2}, 5);
      for (int i = 0; i < 20; ++i) {
        const auto y = torch::full({kMiB / 2}, i);
        if (!y.eq(i).all().item<bool>() || !x.eq(5).all().item<bool>())
          return "memory was overwritten";
      }
      std::string named = "names";
      for (const int rank : error.ranks()) named += " " + std::to_string(rank);
      return named;
    }
    if (!x.eq(size).all().item<bool>()) return "wrong sum";
    rounds.add(1);
  }
}

// A rank is killed while others read and write its memory: they get an error that names it and no
// signal, and keep their own memory intact.
TEST(SharedAllocator, RankKilledWhileOthersReadItsMemory) {
  const auto file = meeting_file();
  SharedCounter rounds;
  RankProcesses ranks(3, [&](int rank) {
    join_job(file, rank, 3);
    return reduce_until_failure(3, rounds);
  });
  ASSERT_TRUE(rounds.wait_for(15, kLimit));
  ranks.kill(1, SIGKILL);
  const auto ends = ranks.join(kLimit);
  for (const std::size_t rank : {0u, 2u})
    EXPECT_EQ(ends[rank].report, "names 1") << "rank " << rank;
}

// A rank is so late that the others have timed out, freed their tensors and reused the memory: it
// must not touch that memory.
TEST(SharedAllocator, RankThatComesTooLateTouchesNothing) {
  const auto file = meeting_file();
  SharedCounter others_done;
  RankProcesses ranks(3, [&](int rank) -> std::string {
    join_job(file, rank, 3);
    for (int i = 0; i < 3; ++i) {
      auto x = torch::ones({kMiB / 2});
      all_reduce(x);
    }
    std::string report = "done";
    {
      auto x = torch::ones({kMiB / 2});
      if (rank == 1 && !others_done.wait_for(2, kLimit)) return "the others do not give up";
      try {
        all_reduce(x, rank == 1 ? AllReduceOptions{}
                                : AllReduceOptions{.timeout = std::chrono::milliseconds(500)});
        report = "no error";
      } catch (const DistError&) {
      }
    }
    TensorList used;
    for (int i = 0; i < 8; ++i) used.push_back(torch::full({kMiB / 2}, 5));
    others_done.add(1);
    if (!others_done.wait_for(3, kLimit)) return "the late rank does not come to an end";
    for (const auto& each : used)
      if (!each.eq(5).all().item<bool>()) report = "memory was overwritten";
    return report;
  });
  for (const auto& end : ranks.join(kLimit)) EXPECT_EQ(end.report, "done");
}

}  // namespace
}  // namespace muster
