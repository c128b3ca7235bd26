// SPDX-License-Identifier: BSD-3-Clause
// Ten million calls of four processes in long runs: every kind of call, sizes from nothing to 16
// MiB, blocking and several at once, on private memory and in the arena. Every result is checked,
// and memory use must stay constant.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "core/collective/communicator.h"
#include "core/shm/arena/arena.h"
#include "testing/budget.h"
#include "testing/limits.h"
#include "testing/process_job.h"
#include "testing/process_usage.h"
#include "testing/rank_processes.h"
#include "testing/scratch_folder.h"
#include "testing/seed.h"

namespace muster::collective {
namespace {

using std::chrono::seconds;
using Value = std::int32_t;

constexpr int kRanks = 4;
constexpr std::size_t kMost = (std::size_t{16} << 20) / sizeof(Value);  // elements of a whole call
constexpr std::size_t kOften = (std::size_t{64} << 10) / sizeof(Value);
constexpr std::uint64_t kRareCall = 10'000;
constexpr int kAtOnce = 4;

/// Returns the same number on every rank for the same arguments.
std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = a * 0x9e3779b97f4a7c15 + b * 0xd1342543de82ef95 + 1;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

/// Every operation, with `send` as a ring of messages; the last kind is several all_reduces at
/// once.
constexpr std::uint64_t kOps = static_cast<std::uint64_t>(Op::send) + 1;

/// The call that all ranks make under a number.
struct Step {
  Step(std::uint64_t seed, std::uint64_t number) : number(number) {
    const std::uint64_t kind = mixed(seed, 4 * number) % (kOps + 1);
    several = kind == kOps;
    op = several ? Op::all_reduce : static_cast<Op>(kind);
    root = static_cast<int>(mixed(seed, 4 * number + 1) % kRanks);
    const std::size_t most = mixed(seed, 4 * number + 2) % kRareCall == 0 ? kMost : kOften;
    const double share = static_cast<double>(mixed(seed, 4 * number + 3) >> 11) /
                         static_cast<double>(std::uint64_t{1} << 53);
    count = static_cast<std::size_t>(std::exp(share * std::log(static_cast<double>(most) + 1)) -
                                     1);  // log-uniform
    if (lists() || several) count /= kRanks;
  }
  bool lists() const { return info(op).lists_input || info(op).lists_output; }

  std::uint64_t number;
  Op op;
  bool several;
  int root;
  std::size_t count;  ///< elements; per slice if there are several
};

/// Element `i` that `from` sends to `to` (0 if all receive the same).
Value given(std::uint64_t number, int from, int to) {
  return static_cast<Value>(number % 4096 * 4096) + from * 64 + to * 8;
}
Value summed(std::uint64_t number, int to) {
  Value sum = 0;
  for (int from = 0; from < kRanks; ++from) sum += given(number, from, to);
  return sum;
}
void fill(std::span<Value> values, Value first) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = first + static_cast<Value>(i & 7);
}
/// `times`: factor of the ramp that every rank adds.
bool holds(std::span<const Value> values, Value first, Value times = 1) {
  Value wrong = 0;
  for (std::size_t i = 0; i < values.size(); ++i)
    wrong |= values[i] ^ (first + times * static_cast<Value>(i & 7));
  return wrong == 0;
}

/// One rank's buffers, private and in the arena.
class Buffers {
 public:
  Buffers() : own_(2 * kMost) {
    auto* arena = *shm::Arena::of_process();
    shared_ = {reinterpret_cast<Value*>(*arena->allocate(2 * kMost * sizeof(Value))), 2 * kMost};
    std::fill(shared_.begin(), shared_.end(), 0);
  }
  std::span<Value> input(bool shared) { return (shared ? shared_ : std::span(own_)).first(kMost); }
  std::span<Value> output(bool shared) { return (shared ? shared_ : std::span(own_)).last(kMost); }

 private:
  std::vector<Value> own_;
  std::span<Value> shared_;
};

class Player {
 public:
  explicit Player(Communicator& world) : world_(world), me_(world.rank()) {}

  /// Returns an error text, or "".
  std::string play(const Step& step, std::uint64_t seed) {
    const std::uint64_t draw =
        mixed(seed ^ 0x5eed, step.number * kRanks + static_cast<std::uint64_t>(me_));
    in_ = buffers_.input(draw % 2 == 0);
    out_ = buffers_.output(draw / 2 % 2 == 0);
    deadline_ = steady_clock().now() + muster::testing::kMustHappen;
    args_ = {};
    args_.dtype = DType::int32;
    const Status status = step.several          ? several(step)
                          : step.op == Op::send ? ring(step)
                                                : collective(step);
    if (!status) return "call " + std::to_string(step.number) + ": " + status.message();
    return right_ ? ""
                  : "call " + std::to_string(step.number) + ", " + std::string(info(step.op).name) +
                        ", " + std::to_string(step.count) + " elements: a wrong result";
  }

 private:
  static ConstBytes bytes(std::span<const Value> values) { return std::as_bytes(values); }
  std::span<Value> part(std::span<Value> whole, const Step& step, int member) {
    return whole.subspan(static_cast<std::size_t>(member) * step.count, step.count);
  }
  void give(std::span<Value> values, Value first) {
    fill(values, first);
    args_.inputs.push_back(bytes(values));
  }
  void send_each(const Step& step) {
    for (int to = 0; to < kRanks; ++to) give(part(in_, step, to), given(step.number, me_, to));
  }
  void take(std::span<Value> values) { args_.outputs.push_back(std::as_writable_bytes(values)); }
  void receive_each(const Step& step) {
    for (int from = 0; from < kRanks; ++from) take(part(out_, step, from));
  }
  void expect(std::span<const Value> values, Value first, Value times = 1) {
    right_ = right_ && holds(values, first, times);
  }

  Status collective(const Step& step) {
    const std::uint64_t n = step.number;
    const bool root = me_ == step.root;
    const std::span<Value> in = in_.first(step.count), out = out_.first(step.count);
    args_.op = step.op;
    if (info(args_.op).rooted) args_.root = step.root;
    switch (step.op) {
      case Op::barrier: break;
      case Op::broadcast:
        if (root) fill(out, given(n, me_, 0));
        take(out);
        break;
      case Op::scatter:
        if (root) send_each(step);
        take(out);
        break;
      case Op::reduce_scatter:
        send_each(step);
        take(out);
        break;
      case Op::all_to_all:
        send_each(step);
        receive_each(step);
        break;
      case Op::gather:
      case Op::all_gather:
        give(in, given(n, me_, 0));
        if (root || step.op == Op::all_gather) receive_each(step);
        break;
      default:
        give(in, given(n, me_, 0));
        if (root || step.op == Op::all_reduce) take(out);
    }
    if (Status status = world_.run(args_, deadline_); !status) return status;
    for (int from = 0; from < kRanks; ++from) {
      if (step.op == Op::all_to_all) expect(part(out_, step, from), given(n, from, me_));
      if (step.op == Op::all_gather || (root && step.op == Op::gather))
        expect(part(out_, step, from), given(n, from, 0));
    }
    if (step.op == Op::broadcast) expect(out, given(n, step.root, 0));
    if (step.op == Op::scatter) expect(out, given(n, step.root, me_));
    if (step.op == Op::reduce_scatter) expect(out, summed(n, me_), kRanks);
    if (step.op == Op::all_reduce || (root && step.op == Op::reduce))
      expect(out, summed(n, 0), kRanks);
    return {};
  }

  /// To the next rank, from the previous one.
  Status ring(const Step& step) {
    const int next = (me_ + 1) % kRanks, before = (me_ + kRanks - 1) % kRanks;
    const std::span<Value> in = in_.first(step.count), out = out_.first(step.count);
    fill(in, given(step.number, me_, next));
    const auto sent = world_.send(next, step.number % 3, bytes(in), DType::int32, deadline_);
    const auto got = world_.receive(before, step.number % 3, std::as_writable_bytes(out),
                                    DType::int32, deadline_);
    if (Status status = got->wait(TimePoint::max()); !status) return status;
    expect(out, given(step.number, before, me_));
    return sent->wait(TimePoint::max());
  }

  Status several(const Step& step) {
    std::vector<PendingRef> calls;
    for (int i = 0; i < kAtOnce; ++i) {
      Args args;
      args.op = Op::all_reduce;
      args.dtype = DType::int32;
      fill(part(in_, step, i), given(step.number, me_, i));
      args.inputs.push_back(bytes(part(in_, step, i)));
      args.outputs.push_back(std::as_writable_bytes(part(out_, step, i)));
      calls.push_back(world_.start(std::move(args), deadline_));
    }
    for (int i = kAtOnce - 1; i >= 0; --i) {
      if (Status status = calls[static_cast<std::size_t>(i)]->wait(TimePoint::max()); !status)
        return status;
      expect(part(out_, step, i), summed(step.number, i), kRanks);
    }
    return {};
  }

  Communicator& world_;
  const int me_;
  Buffers buffers_;
  std::span<Value> in_, out_;
  TimePoint deadline_{};
  Args args_;
  bool right_ = true;
};

/// Physical memory of all ranks, while all are idle.
std::int64_t memory_of_all(Communicator& world) {
  const TimePoint deadline = steady_clock().now() + muster::testing::kMustHappen;
  std::int64_t bytes = -1;
  Args sum{.op = Op::all_reduce, .dtype = DType::int64};
  sum.inputs.push_back(std::as_bytes(std::span(&bytes, 1)));
  sum.outputs.push_back(std::as_writable_bytes(std::span(&bytes, 1)));
  if (!world.run(Args{}, deadline)) return -1;
  bytes = static_cast<std::int64_t>(testing::proportional_memory());
  return world.run(sum, deadline) ? bytes : -1;
}

std::string soak(int rank, const std::string& store, std::uint64_t calls) {
  testing::ProcessJobOptions options;
  options.rank = rank;
  options.world_size = kRanks;
  options.store_path = store;
  options.heartbeat_limit = Duration::zero();  // other tests may slow this machine down
  auto job = testing::join_process_job(options);
  if (!job.ok()) return job.status().message();
  constexpr std::int64_t kMemoryLimit = std::int64_t{8} << 20;
  Player player(*job->world);
  std::int64_t before = 0;
  std::size_t own_before = 0;
  for (std::uint64_t number = 0; number < calls; ++number) {
    const Step step(testing::test_seed(), number);
    if (auto wrong = player.play(step, testing::test_seed()); !wrong.empty()) {
      job->world->abort("a result is wrong");
      return wrong;
    }
    if (number != calls / 5) continue;
    before = memory_of_all(*job->world);
    own_before = testing::memory_in_use().own;
  }
  const std::int64_t after = memory_of_all(*job->world);
  const std::size_t own_after = testing::memory_in_use().own;
  if (const Status closed = job->world->close(steady_clock().now() + muster::testing::kMustHappen);
      !closed)
    return closed.message();
  if (testing::kMemoryTells && testing::proportional_memory() == 0)
    return "this system does not tell how much memory a process takes";
  if (testing::whole_matrices() && own_after > own_before + std::size_t{kMemoryLimit})
    return "this rank's own memory grew from " + std::to_string(own_before) + " to " +
           std::to_string(own_after) + " bytes";
  if (testing::whole_matrices() && after > before + kMemoryLimit)
    return "what all ranks take together grew from " + std::to_string(before) + " to " +
           std::to_string(after) + " bytes";
  if (rank == 0)
    std::printf("%lld bytes of memory in all after a fifth of the calls, %lld in the end\n",
                static_cast<long long>(before), static_cast<long long>(after));
  return "right";
}

// spec: F15 F16 ten million mixed calls in long runs, results checked, memory flat
TEST(Soak, MixedCallsOfFourRanks) {
  SCOPED_TRACE("MUSTER_TEST_SEED=" + std::to_string(testing::test_seed()));
  const auto calls = static_cast<std::uint64_t>(testing::test_rounds(10'000, 10'000'000));
  const testing::ScratchFolder scratch;
  testing::RankProcesses ranks(kRanks,
                               [&](int rank) { return soak(rank, scratch.file("store"), calls); });
  for (const auto& end : ranks.join(seconds(testing::long_tests() ? 3000 : 250)))
    EXPECT_EQ(end.report, "right");
}

}  // namespace
}  // namespace muster::collective
