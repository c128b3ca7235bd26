// SPDX-License-Identifier: BSD-3-Clause
/// Test support: the members of a group on one region in ordinary memory, with channels that only
/// compare and fail; random calls with their expected results; schedulers that step the members in
/// one thread or in many.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "core/collective/call.h"
#include "core/collective/control.h"
#include "core/collective/kernels/kernels.h"
#include "core/collective/region/region_member.h"
#include "core/shm/arena/arena.h"
#include "core/shm/region_memory.h"
#include "core/transport/fabric.h"
#include "testing/seed.h"

namespace muster::collective::region {

using fixed::kInlineBytes;
using fixed::kRegionSlots;
using fixed::kSlotBytes;
using fixed::kWindows;
using shm::BufferLocation;
using shm::direct_read_bytes;
using shm::kCacheLine;
using shm::kRefreshEvery;
using shm::Line;
using shm::missing_among;
using shm::MissingPeers;
using shm::ReaderSlice;
using shm::SegmentLayout;

using Random = std::mt19937_64;
inline std::size_t draw(Random& random, std::size_t below) {
  return std::uniform_int_distribution<std::size_t>(0, below - 1)(random);
}

/// The parts of a fabric that a member needs after a failure: time and deaths.
class TestFabric final : public transport::Fabric {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  const Clock& clock() const override { return steady_clock(); }
  std::span<const int> hosts() const override { return {}; }
  shm::HostRegion* region() override { return nullptr; }
  transport::Channel& bootstrap() override { std::abort(); }
  transport::Channel& agreements() override { std::abort(); }
  Result<std::shared_ptr<transport::Channel>> open(std::uint32_t, std::vector<int>) override {
    return Status(Code::unsupported, "test");
  }
  std::uint32_t next_channel_id() const override { return 1; }
  bool poll() override { return false; }
  bool wait(const std::function<bool()>& done, TimePoint) override { return done(); }
  void wake() override {}
  Status death_of(int rank) const override {
    return rank == dead ? Status(Code::peer_failed, "died", {rank}) : Status();
  }
  void declare_dead(int, Status) override {}
  void suspend_heartbeats(bool) override {}

  int cores() const override { return shared_cores > 0 ? shared_cores : usable_cores(); }

  int dead = -1;
  int shared_cores = 0;  // by all ranks; 0: as on this machine
};

/// The failure of one member's channel reaches the others if `spread` is set.
class TestChannel final : public transport::Channel {
 public:
  TestChannel(std::vector<int> members, int rank, TestFabric& fabric)
      : members_(std::move(members)), rank_(rank), fabric_(fabric) {}

  std::uint32_t id() const override { return 1; }
  std::span<const int> members() const override { return members_; }
  int rank() const override { return rank_; }
  transport::Fabric& fabric() override { return fabric_; }
  transport::TransferRef send(int, std::uint64_t, ConstBytes,
                              const transport::Fingerprint&) override {
    return nullptr;
  }
  transport::TransferRef receive(int, std::uint64_t, MutableBytes, const transport::Fingerprint&,
                                 bool) override {
    return nullptr;
  }
  void cancel(const transport::TransferRef&) override {}
  void begin(const transport::Fingerprint& call) override { call_ = call; }
  void compare(int member, const transport::Fingerprint& call) override {
    if (call.sequence != call_.sequence || fingerprint_rules().agree(call, call_)) return;
    fail(Status(Code::mismatch, "rank " +
                                    std::to_string(members_[static_cast<std::size_t>(rank_)]) +
                                    " calls " + fingerprint_rules().describe(call_) + ", rank " +
                                    std::to_string(members_[static_cast<std::size_t>(member)]) +
                                    " calls " + fingerprint_rules().describe(call)));
  }
  Status failure() const override {
    if (!failed()) return Status();
    const std::lock_guard guard(lock_);
    return failure_;
  }
  void fail(Status cause) override {
    {
      const std::lock_guard guard(lock_);
      if (!failure_.ok()) return;
      failure_ = cause;
    }
    failed_.store(true, std::memory_order_release);
    if (spread) spread(cause);
  }
  std::vector<int> awaited() const override { return {}; }

  std::function<void(const Status&)> spread;

 private:
  std::vector<int> members_;
  int rank_;
  TestFabric& fabric_;
  transport::Fingerprint call_;
  mutable std::mutex lock_;
  Status failure_;
};

/// Job rank 10 + 3 * member, so that confusing members and ranks is detected.
inline int job_rank(int member) { return 10 + 3 * member; }

/// A call as its caller's thread starts it.
struct InlineStart {
  explicit InlineStart(const transport::Fingerprint& call) { starting.assign(call, call.sequence); }
  CallRecord record{TimePoint::max()};
  StartingCall starting{record};
};
inline bool try_inline(RegionGroup& group, const Args& args, const transport::Fingerprint& call) {
  InlineStart start(call);
  return group.inline_calls().try_inline(args, start.starting);
}

class RegionJob {
 public:
  /// `reads`: whether members can read each other's memory in place; if unset, depends on seed and
  /// size. `oversubscribed`: whether the ranks share one core or have one each; if unset, as on
  /// this machine.
  explicit RegionJob(int size, const shm::ArenaLookup& lookup = {}, std::optional<bool> reads = {},
                     std::optional<bool> oversubscribed = {}) {
    if (oversubscribed) fabric.shared_cores = *oversubscribed ? 1 : size;
    shm::RegionShape shape;
    for (int member = 0; member < size; ++member) shape.ranks.push_back(job_rank(member));
    shape.ring_bytes = 4096;
    shape.readable =
        reads.value_or((testing::test_seed() + static_cast<std::uint64_t>(size)) % 2 == 0);
    shape.segment_bytes = 2 * std::bit_ceil(RegionGroup::segment_bytes(size));
    const std::size_t bytes = shm::region_bytes(shape);
    auto* memory = static_cast<std::byte*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    owner_ = std::shared_ptr<void>(memory, [bytes](void* mapping) { munmap(mapping, bytes); });
    shm::lay_out_region(memory, shape);
    for (int member = 0; member < size; ++member) {
      auto region = shm::open_region(memory, shape, member, owner_, lookup);
      EXPECT_TRUE(region.ok()) << region.status().message();
      regions.push_back(std::move(*region));
      channels.push_back(std::make_unique<TestChannel>(shape.ranks, member, fabric));
      channels.back()->spread = [this](const Status& cause) {
        for (auto& channel : channels) channel->fail(cause);
      };
    }
    auto segment = regions[0]->claim(RegionGroup::segment_bytes(size));
    EXPECT_TRUE(segment.ok()) << segment.status().message();
    segment_ = *segment;
    const Selection selection(
        Medium::shared_memory, size,
        {.first_ranks = {0}, .per_core = oversubscribed.value_or(false) ? 2 : 1});
    for (int member = 0; member < size; ++member) {
      groups.push_back(
          RegionGroup::attach(*regions[at(member)], *segment, *channels[at(member)], selection));
    }
  }
  static std::size_t at(int member) { return static_cast<std::size_t>(member); }
  /// Whether `giver`'s slice for `reader` is read in place, in a call whose slices do not fit into
  /// its slot.
  bool stays(int giver, std::uint64_t sequence, int reader) {
    const auto begin =
        shm::align_up(reinterpret_cast<std::uintptr_t>(regions[0]->at(segment_)), sizeof(Line));
    return reinterpret_cast<const ReaderSlice*>(begin +
                                                SegmentLayout(size()).slot(giver, sequence))[reader]
               .location == BufferLocation::memory;
  }
  /// Whether a member's windows hold slices of this length completely: it is then done before any
  /// member has read them.
  bool windows_hold(std::size_t bytes) const {
    return bytes <= kWindows * SegmentLayout(size()).column_bytes;
  }
  int size() const { return static_cast<int>(groups.size()); }
  Task<Status> run(int member, const Args& args, const transport::Fingerprint& call) {
    channels[at(member)]->begin(call);
    // Half of the small calls begin inline, as in a communicator. In one thread no other member's
    // line is there yet, so they continue as tasks.
    const bool begins_inline =
        (call.sequence + static_cast<std::uint64_t>(member) + testing::test_seed()) % 2 == 0;
    return begins_inline ? begin_inline(*groups[at(member)], args, call)
                         : groups[at(member)]->run(args, call);
  }

  TestFabric fabric;
  std::vector<std::unique_ptr<shm::HostRegion>> regions;
  std::vector<std::unique_ptr<TestChannel>> channels;
  std::vector<std::unique_ptr<RegionGroup>> groups;

 private:
  static Task<Status> begin_inline(RegionGroup& group, const Args& args,
                                   transport::Fingerprint call) {
    if (try_inline(group, args, call)) co_return Status();
    co_return co_await group.run(args, call);
  }

  std::shared_ptr<void> owner_;
  std::uint64_t segment_ = 0;
};

/// Steps all tasks in turn until all are done; false after `passes`.
inline bool finish(std::vector<Task<Status>>& tasks, int passes = 1000) {
  for (int pass = 0; pass < passes; ++pass) {
    bool all = true;
    for (auto& task : tasks) all = task.step() && all;
    if (all) return true;
  }
  return false;
}

/// Memory with guards around it, private or in the arena.
class Buffer {
 public:
  Buffer(std::size_t bytes, bool in_arena) : bytes_(bytes) {
    const std::size_t whole = bytes + 2 * kGuard;
    if (in_arena) {
      arena_ = *shm::Arena::of_process();
      memory_ = *arena_->allocate(whole);
    } else {
      memory_ = new std::byte[whole];
    }
    std::memset(memory_, 0x5a, whole);
  }
  Buffer(Buffer&& other) noexcept
      : bytes_(other.bytes_),
        arena_(other.arena_),
        memory_(std::exchange(other.memory_, nullptr)) {}
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer() {
    if (memory_ == nullptr) return;
    arena_ != nullptr ? arena_->free(memory_) : delete[] memory_;
  }
  MutableBytes bytes() { return {memory_ + kGuard, bytes_}; }
  bool guarded() const {
    const auto is_guard = [](std::byte byte) { return byte == std::byte{0x5a}; };
    return std::all_of(memory_, memory_ + kGuard, is_guard) &&
           std::all_of(memory_ + kGuard + bytes_, memory_ + bytes_ + 2 * kGuard, is_guard);
  }

 private:
  static constexpr std::size_t kGuard = 64;
  std::size_t bytes_;
  shm::Arena* arena_ = nullptr;
  std::byte* memory_ = nullptr;
};

/// Random bits; finite numbers for floating-point types.
inline void fill_random(MutableBytes bytes, DType dtype, Random& random) {
  for (std::size_t i = 0; i < bytes.size(); i += 8) {
    const std::uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, std::min<std::size_t>(8, bytes.size() - i));
  }
  std::size_t width = 0;
  switch (dtype) {
    case DType::float16:
    case DType::bfloat16: width = 2; break;
    case DType::float32:
    case DType::complex64: width = 4; break;
    case DType::float64:
    case DType::complex128: width = 8; break;
    default: return;
  }
  for (std::size_t i = width - 1; i < bytes.size(); i += width) bytes[i] &= std::byte{0xbf};
}

struct CallShape {
  Op op = Op::barrier;
  DType dtype = DType::float32;
  Reduce reduce = Reduce::sum;
  std::size_t count = 0;  ///< elements; per slice if a side lists
  bool uneven = false;    ///< slices differ in length, some are empty
  int root = 0;
  double arena = 0.5;  ///< fraction of the buffers in the arena
  double factor = 0.5;
};

/// One call of all members: buffers, arguments, expected results.
class TestCall {
 public:
  TestCall(const CallShape& shape, int size, std::uint64_t sequence, Random& random)
      : shape_(shape), size_(size), sequence_(sequence), members_(static_cast<std::size_t>(size)) {
    const OpInfo& row = info(shape.op);
    // counts[s][r]: elements that s sends to r.
    std::vector<std::vector<std::size_t>> counts(
        members_.size(), std::vector<std::size_t>(members_.size(), shape.count));
    if (shape.uneven) vary(counts, random);
    for (int member = 0; member < size; ++member) make_member(member, row, counts, random);
    expect(row);
    for (Member& member : members_) say_equal(member.args, random);
  }

  const Args& args(int member) const { return at(member).args; }
  const transport::Fingerprint& fingerprint(int member) const { return at(member).call; }

  /// Call once `member` has returned: checks its outputs and that its inputs are unchanged, then
  /// overwrites them all, as a caller may.
  ::testing::AssertionResult check(int member) {
    Member& mine = members_[static_cast<std::size_t>(member)];
    for (std::size_t i = 0; i < mine.args.outputs.size(); ++i) {
      if (auto same = compare(mine.args.outputs[i], mine.expected[i]); !same) {
        return same << " in output " << i << " of member " << member << " in " << describe();
      }
    }
    for (std::size_t i = 0; i < mine.args.inputs.size(); ++i) {
      const bool overwritten =
          std::any_of(mine.args.outputs.begin(), mine.args.outputs.end(), [&](MutableBytes out) {
            return out.data() == mine.args.inputs[i].data() && !out.empty();
          });
      if (overwritten) continue;
      if (auto same = compare(mine.args.inputs[i], mine.inputs[i]); !same) {
        return same << " in input " << i << " of member " << member << " in " << describe();
      }
    }
    for (Buffer& buffer : mine.buffers) {
      if (!buffer.guarded())
        return ::testing::AssertionFailure()
               << "memory beside a buffer was written in " << describe();
      std::fill(buffer.bytes().begin(), buffer.bytes().end(), std::byte{0xee});
    }
    return ::testing::AssertionSuccess();
  }
  std::string describe() const {
    return fingerprint_rules().describe(at(0).call) + " number " + std::to_string(sequence_) +
           ", " + std::to_string(shape_.count) + " elements" +
           (shape_.uneven ? " or so each" : "") + " of " + std::string(name_of(shape_.dtype)) +
           ", " + std::to_string(size_) + " members";
  }

 private:
  using Bytes = std::vector<std::byte>;
  struct Member {
    Args args;
    transport::Fingerprint call;
    std::vector<Buffer> buffers;
    std::vector<Bytes> inputs;    // as they were
    std::vector<Bytes> expected;  // of the outputs
  };
  const Member& at(int member) const { return members_[static_cast<std::size_t>(member)]; }

  static ::testing::AssertionResult compare(ConstBytes is, const Bytes& expected) {
    if (is.size() != expected.size())
      return ::testing::AssertionFailure() << is.size() << " bytes for " << expected.size();
    const auto different = std::mismatch(is.begin(), is.end(), expected.begin()).first;
    if (different == is.end()) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure()
           << "byte " << (different - is.begin()) << " of " << is.size() << " is wrong";
  }

  void vary(std::vector<std::vector<std::size_t>>& counts, Random& random) const {
    std::vector<std::size_t> of_member(members_.size());
    for (std::size_t& count : of_member)
      count = draw(random, 4) == 0 ? 0 : draw(random, 2 * shape_.count + 1);
    for (std::size_t giver = 0; giver < counts.size(); ++giver) {
      for (std::size_t taker = 0; taker < counts.size(); ++taker) {
        switch (shape_.op) {
          case Op::all_gather:
          case Op::gather: counts[giver][taker] = of_member[giver]; break;
          case Op::scatter:
          case Op::reduce_scatter: counts[giver][taker] = of_member[taker]; break;
          case Op::all_to_all:
            counts[giver][taker] = draw(random, 4) == 0 ? 0 : draw(random, 2 * shape_.count + 1);
            break;
          default: break;
        }
      }
    }
  }

  // Some callers say that all slices are equally long, if they are; others do not.
  static void say_equal(Args& args, Random& random) {
    std::vector<std::size_t> lengths;
    for (const ConstBytes input : args.inputs) lengths.push_back(input.size());
    for (const MutableBytes output : args.outputs) lengths.push_back(output.size());
    const bool equal =
        std::adjacent_find(lengths.begin(), lengths.end(), std::not_equal_to<>()) == lengths.end();
    if (equal && draw(random, 2) == 0) args.each = lengths.empty() ? 0 : lengths.front();
  }

  MutableBytes add_buffer(Member& member, std::size_t count, Random& random) {
    const bool in_arena = std::bernoulli_distribution(shape_.arena)(random);
    member.buffers.emplace_back(count * size_of(shape_.dtype), in_arena);
    return member.buffers.back().bytes();
  }

  // Slices in one piece of memory or in several.
  std::vector<MutableBytes> add_slices(Member& member, const std::vector<std::size_t>& counts,
                                       Random& random) {
    std::vector<MutableBytes> slices;
    if (draw(random, 2) == 0) {
      for (std::size_t count : counts) slices.push_back(add_buffer(member, count, random));
      return slices;
    }
    std::size_t whole = 0;
    for (std::size_t count : counts) whole += count;
    MutableBytes memory = add_buffer(member, whole, random);
    for (std::size_t count : counts) {
      slices.push_back(memory.first(count * size_of(shape_.dtype)));
      memory = memory.subspan(count * size_of(shape_.dtype));
    }
    return slices;
  }

  void make_member(int rank, const OpInfo& row, const std::vector<std::vector<std::size_t>>& counts,
                   Random& random) {
    const auto index = static_cast<std::size_t>(rank);
    Member& member = members_[index];
    member.buffers.reserve(2 * members_.size() + 2);
    Args& args = member.args;
    args.op = shape_.op;
    args.dtype = shape_.dtype;
    args.reduce = shape_.reduce;
    args.factor = shape_.factor;
    args.root = row.rooted ? shape_.root : -1;
    if (shape_.op != Op::barrier) {
      const bool root = !row.rooted || rank == shape_.root;
      std::vector<std::size_t> given = counts[index];
      std::vector<std::size_t> taken;
      for (const auto& giver : counts) taken.push_back(giver[index]);
      const bool in_place = draw(random, 2) == 0;
      if (shape_.op != Op::broadcast && (shape_.op != Op::scatter || root)) {
        if (!row.lists_input) given.resize(1);
        for (MutableBytes slice : add_slices(member, given, random)) {
          fill_random(slice, shape_.dtype, random);
          args.inputs.push_back(slice);
        }
      }
      if (root || (shape_.op != Op::reduce && shape_.op != Op::gather)) {
        if (!row.lists_output)
          taken = {taken[row.rooted ? static_cast<std::size_t>(shape_.root) : index]};
        if (in_place && !row.lists_output && shape_.op != Op::broadcast && root) {
          const ConstBytes own = args.inputs[row.lists_input ? index : 0];
          args.outputs.push_back({const_cast<std::byte*>(own.data()), own.size()});
        } else {
          args.outputs = add_slices(member, taken, random);
          for (MutableBytes slice : args.outputs) fill_random(slice, shape_.dtype, random);
          if (in_place && row.lists_output && !row.lists_input) {
            std::copy(args.inputs[0].begin(), args.inputs[0].end(), args.outputs[index].begin());
            args.inputs[0] = args.outputs[index];
          }
        }
      }
      for (ConstBytes input : args.inputs) member.inputs.emplace_back(input.begin(), input.end());
      for (MutableBytes output : args.outputs)
        member.expected.emplace_back(output.begin(), output.end());
    }
    EXPECT_TRUE(validate(args, rank, size_).ok())
        << validate(args, rank, size_).message() << describe();
    member.call = fingerprint_of(args, sequence_);
  }

  Bytes reduced(std::size_t slice) const {
    std::vector<Bytes> inputs;
    std::vector<const std::byte*> pointers;
    for (const Member& member : members_) inputs.push_back(member.inputs[slice]);
    const std::size_t count = inputs[0].size() / size_of(shape_.dtype);
    for (Bytes& input : inputs) {
      if (shape_.reduce == Reduce::premul_sum)
        scale(input.data(), Bytes(input).data(), count, shape_.dtype, shape_.factor);
      pointers.push_back(input.data());
    }
    Bytes out(inputs[0].size());
    reduce_complete(out.data(), pointers, count, shape_.dtype, shape_.reduce);
    return out;
  }

  void expect(const OpInfo& row) {
    const auto root = static_cast<std::size_t>(shape_.root);
    if (shape_.op == Op::barrier) return;
    const Bytes whole = row.reduces && !row.lists_input ? reduced(0) : Bytes();
    for (std::size_t me = 0; me < members_.size(); ++me) {
      std::vector<Bytes>& expected = members_[me].expected;
      for (std::size_t i = 0; i < expected.size(); ++i) {
        switch (shape_.op) {
          case Op::broadcast: expected[0] = at(shape_.root).expected[0]; break;
          case Op::all_reduce:
          case Op::reduce: expected[0] = whole; break;
          case Op::all_gather:
          case Op::gather: expected[i] = members_[i].inputs[0]; break;
          case Op::scatter: expected[0] = members_[root].inputs[me]; break;
          case Op::reduce_scatter: expected[0] = reduced(me); break;
          case Op::all_to_all: expected[i] = members_[i].inputs[me]; break;
          default: break;
        }
      }
    }
  }

  CallShape shape_;
  int size_;
  std::uint64_t sequence_;
  std::vector<Member> members_;
};

/// Steps the members through `calls` in one thread, in random order; members run ahead of each
/// other as far as they can. False if nothing moves any more or a result is wrong.
inline ::testing::AssertionResult run_in_random_order(RegionJob& job,
                                                      std::vector<std::unique_ptr<TestCall>>& calls,
                                                      Random& random) {
  struct Runner {
    std::size_t next = 0;
    Task<Status> task;
  };
  std::vector<Runner> runners(static_cast<std::size_t>(job.size()));
  std::size_t left = runners.size();
  std::size_t idle = 0;
  while (left > 0) {
    // Either one random member, or the same one many times, so that it runs ahead of all others.
    const int member = static_cast<int>(draw(random, runners.size()));
    for (std::size_t burst = draw(random, 4) == 0 ? 50 : 1; burst > 0; --burst) {
      Runner& runner = runners[static_cast<std::size_t>(member)];
      if (runner.next == calls.size()) break;
      TestCall& call = *calls[runner.next];
      if (!runner.task.valid())
        runner.task = job.run(member, call.args(member), call.fingerprint(member));
      if (!runner.task.step()) {
        if (++idle > 200'000) {
          auto stuck = ::testing::AssertionFailure() << "nothing moves in";
          for (int i = 0; i < job.size(); ++i) {
            const Runner& one = runners[static_cast<std::size_t>(i)];
            stuck << "\n  member " << i << ": ";
            if (one.next == calls.size()) {
              stuck << "at the end";
              continue;
            }
            stuck << calls[one.next]->describe()
                  << (one.task.valid() ? ", waits for" : ", not begun");
            for (const int rank : job.groups[static_cast<std::size_t>(i)]->awaited())
              stuck << ' ' << rank;
          }
          return stuck;
        }
        continue;
      }
      idle = 0;
      const Status status = runner.task.result();
      if (!status) return ::testing::AssertionFailure() << status.message();
      runner.task = {};
      if (auto right = call.check(member); !right) return right;
      if (++runner.next == calls.size()) --left;
    }
  }
  return ::testing::AssertionSuccess();
}

inline CallShape shape_of(Op op, std::size_t count, double arena) {
  CallShape shape;
  shape.op = op;
  shape.count = count;
  shape.arena = arena;
  return shape;
}

/// All members' tasks of one call, none of them stepped yet.
inline std::vector<Task<Status>> start(RegionJob& job, const TestCall& call) {
  std::vector<Task<Status>> tasks;
  for (int member = 0; member < job.size(); ++member)
    tasks.push_back(job.run(member, call.args(member), call.fingerprint(member)));
  return tasks;
}

}  // namespace muster::collective::region
