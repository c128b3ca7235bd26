// SPDX-License-Identifier: BSD-3-Clause
// The region between real processes: covers what threads on one mapping cannot.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/collective/communicator.h"
#include "core/collective/region_group.h"
#include "core/shm/arena/arena.h"
#include "testing/limits.h"
#include "testing/process_job.h"
#include "testing/rank_processes.h"
#include "testing/scratch_folder.h"

namespace muster::collective {
namespace {

constexpr int kProcesses = 4;
constexpr std::size_t kCount = 300'000;

// Sums float64 buffers, in the arena on the ranks of `in_arena`, private on the others. Returns an
// error text, or "".
std::string sum_on(int rank, unsigned in_arena, bool read_only, Communicator& world) {
  const std::size_t bytes = kCount * sizeof(double);
  std::vector<std::byte> own(bytes);
  std::byte* memory = own.data();
  if ((in_arena >> rank & 1) != 0) {
    auto arena = shm::Arena::of_process();
    if (!arena.ok()) return arena.status().message();
    if (read_only) (*arena)->make_read_only();
    auto block = (*arena)->allocate(bytes);
    if (!block.ok()) return block.status().message();
    memory = *block;
  }
  auto* values = reinterpret_cast<double*>(memory);
  for (std::size_t i = 0; i < kCount; ++i)
    values[i] = static_cast<double>(rank + 1) * static_cast<double>(i);
  Args args;
  args.op = Op::all_reduce;
  args.dtype = DType::float64;
  args.inputs = {ConstBytes(memory, bytes)};
  args.outputs = {MutableBytes(memory, bytes)};
  if (Status done = world.run(args, steady_clock().now() + muster::testing::kMustHappen); !done)
    return done.message();
  for (std::size_t i = 0; i < kCount; ++i) {
    if (values[i] != 10.0 * static_cast<double>(i))
      return "element " + std::to_string(i) + " is " + std::to_string(values[i]);
  }
  return "";
}

// All ranks map each other's arenas in the same call, each while it is asked for its own, for
// writing or for reading only.
// spec: F3 all_reduce between processes, arena and private buffers mixed
TEST(RegionProcesses, AllMapEachOthersArenasInOneCall) {
  struct Case {
    unsigned in_arena;
    bool read_only;
  };
  for (const Case& run : {Case{15, false}, Case{5, false}, Case{15, true}, Case{6, true}}) {
    const testing::ScratchFolder folder;
    testing::RankProcesses ranks(kProcesses, [&](int rank) -> std::string {
      testing::ProcessJobOptions options;
      options.rank = rank;
      options.world_size = kProcesses;
      options.store_path = folder.file("store");
      auto job = testing::join_process_job(options);
      if (!job.ok()) return job.status().message();
      for (int round = 0; round < 3; ++round) {
        if (std::string wrong = sum_on(rank, run.in_arena, run.read_only, *job->world);
            !wrong.empty())
          return wrong;
      }
      const Status closed = job->world->close(steady_clock().now() + muster::testing::kMustHappen);
      return closed.ok() ? "done" : closed.message();
    });
    for (const auto& end : ranks.join(muster::testing::kMustHappen)) EXPECT_EQ(end.report, "done");
  }
}

// spec: D7.memory the shared memory of a group with a dead member is freed with its last survivor
TEST(RegionProcesses, SurvivorsFreeTheMemoryOfAGroupWithADeadMember) {
  constexpr int kRanks = 3, kVictim = 0, kObserver = 1;
  const testing::ScratchFolder folder;
  testing::SharedCounter made, closed;
  testing::RankProcesses ranks(kRanks, [&](int rank) -> std::string {
    testing::ProcessJobOptions options;
    options.rank = rank;
    options.world_size = kRanks;
    options.store_path = folder.file("store");
    auto job = testing::join_process_job(options);
    if (!job.ok()) return job.status().message();
    shm::HostRegion& region = *job->fabric->region();
    const auto next_segment = [&] {
      const std::uint64_t offset = region.claim(RegionGroup::segment_bytes(kRanks)).value();
      region.release(offset);
      return offset;
    };
    const std::uint64_t segment = rank == kObserver ? next_segment() : 0;
    made.add(1);
    made.wait_for(kRanks, muster::testing::kMustHappen);
    CommunicatorOptions group_options;
    group_options.name = "mortal";
    group_options.timeout = muster::testing::kMustHappen;
    auto group = Communicator::create(job->fabric, {0, 1, 2}, group_options);
    if (!group.ok()) return group.status().message();
    std::int64_t value = 1, sum = 0;
    Args args;
    args.op = Op::all_reduce;
    args.dtype = DType::int64;
    args.inputs = {std::as_bytes(std::span(&value, 1))};
    args.outputs = {std::as_writable_bytes(std::span(&sum, 1))};
    const auto soon = [] { return steady_clock().now() + muster::testing::kMustHappen; };
    if (Status first = (*group)->run(args, soon()); !first) return first.message();
    if (rank == kObserver && next_segment() == segment)
      return "the group has no memory in the region";
    made.add(1);
    if (rank == kVictim) ::pause();
    if ((*group)->run(args, soon()).code() != Code::peer_failed) return "the death was not seen";
    static_cast<void>((*group)->close(soon()));
    closed.add(1);
    if (!closed.wait_for(kRanks - 1, muster::testing::kMustHappen))
      return "the other did not close";
    return rank != kObserver || next_segment() == segment ? "done" : "the group's memory is kept";
  });
  EXPECT_TRUE(made.wait_for(2 * kRanks, muster::testing::kMustHappen));
  ranks.kill(kVictim, SIGKILL);
  const auto ends = ranks.join(muster::testing::kMustHappen);
  for (const int rank : {1, 2})
    EXPECT_EQ(ends[static_cast<std::size_t>(rank)].report, "done") << "rank " << rank;
}

// Peers that are stopped in the middle of a store.

/// In the rank to be stopped: write-protects its mappings of the others' arenas, so that the first
/// store stops it. When it continues, it finishes that store.
class StopAtTheFirstStore {
 public:
  static void arm(testing::SharedCounter& stopped) {
    stopped_ = &stopped;
    const auto own = reinterpret_cast<std::uintptr_t>((*shm::Arena::of_process())->at(0, 1));
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      std::uintptr_t begin = 0, end = 0;
      if (line.find("muster-arena") == std::string::npos ||
          std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) != 2 || begin == own)
        continue;
      theirs_[count_++] = {reinterpret_cast<void*>(begin), end - begin};
    }
    struct sigaction action {};
    action.sa_handler = &stop;
    ::sigaction(SIGSEGV, &action, nullptr);
    protect(PROT_READ);
  }

 private:
  struct Mapping {
    void* memory;
    std::size_t bytes;
  };
  static void protect(int how) {
    for (int i = 0; i < count_; ++i) ::mprotect(theirs_[i].memory, theirs_[i].bytes, how);
  }
  static void stop(int) {
    stopped_->add(1);
    ::raise(SIGSTOP);
    protect(PROT_READ | PROT_WRITE);
  }
  static inline testing::SharedCounter* stopped_ = nullptr;
  static inline std::array<Mapping, 8> theirs_{};
  static inline int count_ = 0;
};

struct StoppedInACall {
  Op op;
  bool found_dead;  // the call fails because the stopped rank does not respond; otherwise at its
                    // deadline
  bool goes_on;     // otherwise it is killed
  bool keeps;  // the others keep the tensors of that call; otherwise they free and replace them
};

/// The last of three ranks is stopped while it stores into the others' outputs. Those free them
/// when their calls have failed, create new ones and fill them; then the stopped rank continues, or
/// dies.
class StoppedPeer {
 public:
  explicit StoppedPeer(const StoppedInACall& run) : run_(run) {}

  void play() {
    testing::RankProcesses ranks(
        kRanks, [this](int rank) { return rank == kVictim ? victim() : survivor(rank); });
    EXPECT_TRUE(refilled_.wait_for(kRanks - 1, muster::testing::kMustHappen));
    EXPECT_EQ(stopped_.value(), 1) << "it did not store into anybody's memory";
    ranks.kill(kVictim, run_.goes_on ? SIGCONT : SIGKILL);
    if (!run_.goes_on) over_.add(1);
    const auto ends = ranks.join(muster::testing::kMustHappen);
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == kVictim && !run_.goes_on) continue;
      EXPECT_EQ(ends[static_cast<std::size_t>(rank)].report, "done") << "rank " << rank;
    }
  }

 private:
  static constexpr int kRanks = 3, kVictim = 2;
  static constexpr std::size_t kBytes = std::size_t{6} << 20;
  static constexpr std::byte kPattern{0x77};

  Result<testing::ProcessJob> join(int rank) {
    testing::ProcessJobOptions options;
    options.rank = rank;
    options.world_size = kRanks;
    options.store_path = folder_.file("store");
    options.heartbeat_limit = std::chrono::milliseconds(run_.found_dead ? 3000 : 0);
    return testing::join_process_job(options);
  }
  Status call(Communicator& world, std::byte* input, std::byte* output, Duration limit) const {
    Args args;
    args.op = run_.op;
    args.dtype = DType::float64;
    args.root = run_.op == Op::reduce ? 0 : -1;
    args.inputs = {ConstBytes(input, kBytes)};
    if (run_.op != Op::reduce || world.rank() == 0) args.outputs = {MutableBytes(output, kBytes)};
    return world.run(args, steady_clock().now() + limit);
  }
  static std::byte* make(std::byte fill = {}) {
    std::byte* const memory = (*shm::Arena::of_process())->allocate(kBytes).value();
    std::fill_n(memory, kBytes, fill);
    return memory;
  }
  static bool holds(const std::byte* memory) {
    return std::all_of(memory, memory + kBytes, [](std::byte byte) { return byte == kPattern; });
  }

  std::string victim() {
    auto job = join(kVictim);
    if (!job.ok()) return job.status().message();
    std::byte *const input = make(), *const output = make();
    if (Status first = call(*job->world, input, output, muster::testing::kMustHappen); !first)
      return first.message();
    StopAtTheFirstStore::arm(stopped_);
    armed_.add(1);
    const Status status = call(*job->world, input, output, muster::testing::kMustHappen);
    over_.add(1);
    return status.ok() ? "a call that the others gave up succeeded" : "done";
  }

  std::string survivor(int rank) {
    auto job = join(rank);
    if (!job.ok()) return job.status().message();
    std::byte *const input = make(), *const output = make();
    if (Status first = call(*job->world, input, output, muster::testing::kMustHappen); !first)
      return first.message();
    if (!armed_.wait_for(1, muster::testing::kMustHappen)) return "the other rank was not ready";
    const Status failed = call(*job->world, input, output,
                               std::chrono::milliseconds(run_.found_dead ? 30'000 : 1500));
    if (failed.code() != (run_.found_dead ? Code::peer_failed : Code::timed_out))
      return "the call ended with: " + failed.message();

    shm::Arena& arena = **shm::Arena::of_process();
    if (run_.keeps) {
      std::fill_n(output, kBytes, kPattern);
      refilled_.add(1);
      if (!over_.wait_for(1, muster::testing::kMustHappen)) return "the stopped rank did not go on";
      return holds(output) ? "done" : "a late store reached a tensor that has other values by now";
    }
    arena.free(output);
    const bool exposes = run_.op != Op::reduce || rank == 0;
    if (const auto stats = arena.stats(); stats.bytes_quarantined != (exposes ? kBytes : 0))
      return std::to_string(stats.bytes_quarantined) + " bytes are quarantined";
    const std::byte* const other = make(kPattern);
    const std::byte* const another = make(kPattern);
    refilled_.add(1);
    if (!over_.wait_for(1, muster::testing::kMustHappen)) return "the stopped rank did not go on";
    const auto limit = steady_clock().now() + muster::testing::kMustHappen;
    do {  // a process does not disappear at once
      arena.trim();
    } while (arena.stats().bytes_quarantined != 0 && steady_clock().now() < limit);
    if (arena.stats().bytes_quarantined != 0)
      return "what nobody holds any more was not given back";
    return holds(other) && holds(another) ? "done"
                                          : "a late store reached memory that has another use";
  }

  const StoppedInACall run_;
  const testing::ScratchFolder folder_;
  testing::SharedCounter armed_, stopped_, refilled_, over_;
};

// spec: D7.memory who goes on after a failure does so with memory that a stopped rank which comes
// back leaves alone
TEST(RegionProcesses, MemoryIsNotReusedWhileAPeerIsStoppedInAStore) {
  constexpr bool kDeadline = false, kFoundDead = true, kKilled = false, kGoesOn = true,
                 kFreed = false, kKept = true;
  for (const StoppedInACall& run : {
           StoppedInACall{Op::all_reduce, kDeadline, kGoesOn, kFreed},
           StoppedInACall{Op::all_reduce, kDeadline, kGoesOn, kKept},
           StoppedInACall{Op::all_reduce, kFoundDead, kGoesOn, kFreed},
           StoppedInACall{Op::all_reduce, kFoundDead, kKilled, kFreed},
           StoppedInACall{Op::reduce, kDeadline, kGoesOn, kFreed},
           StoppedInACall{Op::reduce, kFoundDead, kGoesOn, kKept},
           StoppedInACall{Op::reduce, kDeadline, kKilled, kFreed},
       }) {
    SCOPED_TRACE(std::string(info(run.op).name) + (run.found_dead ? ", found dead" : ", deadline") +
                 (run.goes_on ? ", goes on" : ", is killed") + (run.keeps ? ", kept" : ", freed"));
    StoppedPeer(run).play();
  }
}

}  // namespace
}  // namespace muster::collective
