// SPDX-License-Identifier: BSD-3-Clause
/// Test support for the suites over all operations: one random call (a cell), how a rank plays it,
/// the expected result, and how the cells for a number of ranks are drawn.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "core/collective/communicator.h"
#include "core/collective/select/selection.h"
#include "core/shm/arena/arena.h"
#include "testing/direct_reduction.h"
#include "testing/limits.h"
#include "testing/rank_threads.h"
#include "testing/seed.h"

namespace muster::collective::suite {

using testing::Wire;

inline constexpr std::size_t kGuard = 64;
inline constexpr std::byte kGuardByte{0xa5};

/// One call of all ranks.
struct Cell {
  Op op = Op::barrier;
  DType dtype = DType::uint8;
  Reduce reduce = Reduce::sum;
  std::size_t count = 0;  // elements of a slice, before unevenness
  std::uint64_t seed = 0;
  int ranks = 1;
  bool any_order = false;  // sums of floats need not be in the order of ranks
  std::vector<int> hosts =
      {};  // their first ranks; where there are any, sums may be those of hosts

  int root() const { return static_cast<int>(seed % static_cast<std::uint64_t>(ranks)); }
  bool uneven() const { return info(op).size_rule == SizeRule::free && (seed >> 8) % 2 == 1; }
  bool in_place() const { return (seed >> 9) % 3 == 0; }
  bool started() const { return (seed >> 11) % 3 == 0; }
  bool arena(int rank, int which) const { return (seed >> (16 + 2 * (rank % 8) + which)) % 2 == 1; }
  double factor(int rank) const { return 0.5 * (rank + 1); }

  // Number of elements that `from` sends to `to`.
  std::size_t elements(int from, int to) const {
    if (op == Op::barrier) return 0;
    if (!uneven()) return count;
    const auto pick = static_cast<std::size_t>(op == Op::all_gather       ? from
                                               : op == Op::reduce_scatter ? to
                                                                          : 3 * from + 5 * to);
    return count * ((pick + seed) % 3) / 2;
  }
  std::string text(Wire wire) const {
    return std::string(info(op).name) +
           (info(op).reduces ? " " + std::string(name_of(reduce)) : "") + " " +
           std::string(name_of(dtype)) + " x " + std::to_string(count) +
           (uneven() ? " uneven" : "") + (in_place() ? " in place" : "") +
           (started() ? " started" : "") + " root " + std::to_string(root()) + " on " +
           std::to_string(ranks) + " ranks over " + testing::wire_name(wire) + " (cell seed " +
           std::to_string(seed) + ")";
  }
};

/// Memory of one side, in the arena or private, with guards around it.
class Memory {
 public:
  Memory(std::size_t bytes, bool arena) : bytes_(bytes) {
    const std::size_t whole = bytes + 2 * kGuard;
    if (arena) {
      auto heap = shm::Arena::of_process();
      if (heap.ok()) {
        arena_ = *heap;
        auto taken = arena_->allocate(whole);
        if (taken.ok()) memory_ = *taken;
      }
    }
    if (memory_ == nullptr) {
      arena_ = nullptr;
      private_.resize(whole);
      memory_ = private_.data();
    }
    std::memset(memory_, static_cast<int>(kGuardByte), whole);
  }
  ~Memory() {
    if (arena_ != nullptr) arena_->free(memory_);
  }
  Memory(const Memory&) = delete;

  MutableBytes all() const { return {memory_ + kGuard, bytes_}; }
  bool guards_hold() const {
    for (std::size_t i = 0; i < kGuard; ++i) {
      if (memory_[i] != kGuardByte || memory_[kGuard + bytes_ + i] != kGuardByte) return false;
    }
    return true;
  }

 private:
  std::size_t bytes_;
  shm::Arena* arena_ = nullptr;
  std::vector<std::byte> private_;
  std::byte* memory_ = nullptr;
};

/// Every rank's input in a cell and the expected output, each computed once, on first use. Ranks
/// that are threads share one.
class Answers {
 public:
  explicit Answers(const Cell& cell)
      : cell_(cell), given_(slots()), reduced_(2 * static_cast<std::size_t>(cell.ranks)) {}

  const Cell& cell() const { return cell_; }
  std::size_t given_bytes(int from, int to) const {
    return cell_.elements(from, to) * size_of(cell_.dtype);
  }
  const std::vector<std::byte>& given(int from, int to) {
    const bool same_for_all = !info(cell_.op).lists_input;
    if (same_for_all) to = 0;
    Once& slot = given_[static_cast<std::size_t>(from) * static_cast<std::size_t>(cell_.ranks) +
                        static_cast<std::size_t>(to)];
    std::call_once(slot.done, [&] {
      slot.bytes.resize(given_bytes(from, to));
      const auto receiver = same_for_all ? 0 : static_cast<std::uint64_t>(to) + 1;
      testing::fill_elements(
          slot.bytes, cell_.dtype,
          cell_.seed * 1000003 + static_cast<std::uint64_t>(from) * 1009 + receiver);
    });
    return slot.bytes;
  }
  /// The reduction of all inputs for `to`; in rank order, or by hosts.
  const std::vector<std::byte>& reduced(int to, bool by_hosts = false) {
    if (!info(cell_.op).lists_input) to = 0;
    Once& slot = reduced_[static_cast<std::size_t>(to) +
                          static_cast<std::size_t>(by_hosts ? cell_.ranks : 0)];
    std::call_once(slot.done, [&] {
      std::vector<ConstBytes> inputs;
      std::vector<double> factors;
      for (int rank = 0; rank < cell_.ranks; ++rank) {
        inputs.emplace_back(given(rank, to));
        factors.push_back(cell_.factor(rank));
      }
      slot.bytes.resize(inputs[0].size());
      if (by_hosts)
        testing::reduce_by_hosts(slot.bytes, inputs, factors, cell_.dtype, cell_.reduce,
                                 cell_.hosts);
      else
        testing::reduce_directly(slot.bytes, inputs, factors, cell_.dtype, cell_.reduce);
    });
    return slot.bytes;
  }

 private:
  struct Once {
    std::once_flag done;
    std::vector<std::byte> bytes;
  };
  std::size_t slots() const {
    return static_cast<std::size_t>(cell_.ranks) * static_cast<std::size_t>(cell_.ranks);
  }

  const Cell cell_;
  std::vector<Once> given_;
  std::vector<Once> reduced_;
};

/// One rank's part in one cell: makes the call and returns an error text, or "".
class Player {
 public:
  Player(Answers& answers, int rank) : answers_(answers), cell_(answers.cell()), rank_(rank) {}

  std::string play(Communicator& group) {
    Memory input(lists_input() ? input_bytes_of_all() : contribution_bytes(rank_, rank_),
                 cell_.arena(rank_, 0));
    Memory output(lists_output() ? output_bytes_of_all() : output_bytes(), cell_.arena(rank_, 1));
    const Args args = make_args(input, output);
    const std::vector<std::byte> before(input.all().begin(), input.all().end());

    const TimePoint deadline = steady_clock().now() + muster::testing::kMustHappen;
    const Status status = cell_.started() ? group.start(args, deadline)->wait(TimePoint::max())
                                          : group.run(args, deadline);
    if (!status.ok()) return "failed: " + status.message();
    if (!input.guards_hold() || !output.guards_hold())
      return "bytes outside the buffers were written";
    if (!in_place_ && !std::equal(before.begin(), before.end(), input.all().begin()))
      return "the input was changed";
    return check(args, output);
  }

 private:
  bool lists_input() const { return info(cell_.op).lists_input; }
  bool lists_output() const { return info(cell_.op).lists_output; }
  bool root() const { return !info(cell_.op).rooted || cell_.root() == rank_; }

  std::size_t contribution_bytes(int from, int to) const { return answers_.given_bytes(from, to); }
  std::size_t input_bytes_of_all() const {
    std::size_t sum = 0;
    for (int to = 0; to < cell_.ranks; ++to) sum += contribution_bytes(rank_, to);
    return sum;
  }
  std::size_t output_bytes_of_all() const {
    std::size_t sum = 0;
    for (int from = 0; from < cell_.ranks; ++from) sum += contribution_bytes(from, rank_);
    return sum;
  }
  std::size_t output_bytes() const { return contribution_bytes(rank_, rank_); }

  Args make_args(Memory& input, Memory& output) {
    Args args;
    args.op = cell_.op;
    args.dtype = cell_.dtype;
    args.reduce = cell_.reduce;
    args.factor = cell_.factor(rank_);
    args.root = info(cell_.op).rooted ? cell_.root() : -1;
    if (cell_.op == Op::barrier) return args;
    std::size_t at = 0;
    for (int from = 0; lists_output() && from < cell_.ranks; ++from) {
      args.outputs.push_back(output.all().subspan(at, contribution_bytes(from, rank_)));
      at += contribution_bytes(from, rank_);
    }
    if (!lists_output()) args.outputs.push_back(output.all());
    at = 0;
    for (int to = 0; lists_input() && to < cell_.ranks; ++to) {
      args.inputs.push_back(fill(input.all().subspan(at, contribution_bytes(rank_, to)), to));
      at += contribution_bytes(rank_, to);
    }
    if (cell_.op == Op::broadcast) {
      if (root()) fill(output.all(), rank_);
      return args;
    }
    if (!lists_input()) args.inputs.push_back(fill(input.all(), rank_));
    if (cell_.in_place() && root()) make_in_place(args);
    // Members that neither read nor write a side need not pass it.
    if (!root() && cell_.op == Op::scatter && (cell_.seed >> 40) % 2 == 0) args.inputs.clear();
    if (!root() && cell_.op == Op::gather && (cell_.seed >> 40) % 2 == 0) args.outputs.clear();
    if (!root() && cell_.op == Op::reduce && (cell_.seed >> 40) % 2 == 0) args.outputs.clear();
    return args;
  }

  ConstBytes fill(MutableBytes where, int to) const {
    const auto& data = answers_.given(rank_, to);
    if (!data.empty()) std::memcpy(where.data(), data.data(), data.size());
    return where;
  }

  // Makes this member's own input and output the same memory.
  void make_in_place(Args& args) {
    in_place_ = true;
    const auto me = static_cast<std::size_t>(rank_);
    ConstBytes& input = args.inputs[lists_input() ? me : 0];
    const MutableBytes output = args.outputs[lists_output() ? me : 0];
    if (!input.empty()) std::memcpy(output.data(), input.data(), input.size());
    input = output;
  }

  const std::vector<std::byte>& expected(int from) const {
    switch (cell_.op) {
      case Op::broadcast:
      case Op::scatter: return answers_.given(cell_.root(), rank_);
      case Op::all_gather:
      case Op::gather:
      case Op::all_to_all: return answers_.given(from, rank_);
      default: return answers_.reduced(rank_);
    }
  }

  std::string check(const Args& args, const Memory& output) const {
    if (!root() && (cell_.op == Op::reduce || cell_.op == Op::gather)) {
      for (std::byte value : output.all()) {
        if (value != kGuardByte) return "the output was written though this rank is not the root";
      }
      return {};
    }
    for (std::size_t slice = 0; slice < args.outputs.size(); ++slice) {
      const auto& right = expected(static_cast<int>(slice));
      std::ptrdiff_t wrong =
          cell_.any_order && info(cell_.op).reduces
              ? testing::first_difference_in_any_order(args.outputs[slice], right, cell_.dtype)
              : testing::first_difference(args.outputs[slice], right, cell_.dtype);
      if (wrong >= 0 && !cell_.hosts.empty() && info(cell_.op).reduces)
        wrong = testing::first_difference(args.outputs[slice], answers_.reduced(rank_, true),
                                          cell_.dtype);
      if (wrong >= 0)
        return "output " + std::to_string(slice) + " is wrong from element " +
               std::to_string(wrong) + " on";
    }
    return {};
  }

  Answers& answers_;
  const Cell& cell_;
  const int rank_;
  bool in_place_ = false;
};

struct Kind {
  Op op;
  DType dtype;
  Reduce reduce;
};

inline std::vector<Kind> all_kinds() {
  std::vector<Kind> kinds;
  for (int o = 0; o < static_cast<int>(Op::send); ++o) {
    const auto op = static_cast<Op>(o);
    if (op == Op::barrier) {
      kinds.push_back({op, DType::uint8, Reduce::sum});
      continue;
    }
    for (int d = 0; d < kDTypes; ++d) {
      const auto dtype = static_cast<DType>(d);
      if (!info(op).reduces) kinds.push_back({op, dtype, Reduce::sum});
      for (int r = 0; info(op).reduces && r < kReduces; ++r) {
        if (reduce_supports(static_cast<Reduce>(r), dtype))
          kinds.push_back({op, dtype, static_cast<Reduce>(r)});
      }
    }
  }
  return kinds;
}

// Nothing, one, primes, sizes beside the limits of the algorithms, and more than two chunks of
// each.
inline std::vector<std::size_t> counts_of(Op op, DType dtype, int ranks) {
  const std::size_t width = size_of(dtype);
  const std::size_t parts =
      info(op).lists_input || info(op).lists_output ? 1 : static_cast<std::size_t>(ranks);
  std::vector<std::size_t> counts{0,
                                  1,
                                  7,
                                  1009,
                                  65536 / width / static_cast<std::size_t>(ranks) + 1,
                                  (parts * 600 * 1024 + 8) / width + 1};
  if (op == Op::reduce) counts.push_back(96 * 1024 / width + 1);  // uses ready-to-receive
  return counts;
}

/// The first ranks of several hosts of two ranks each (the last may have one); none otherwise.
inline std::vector<int> pairs_on_hosts(testing::Wire wire, int ranks) {
  if (wire != testing::Wire::hosts || ranks <= 2) return {};
  return even_hosts(ranks, 2);
}

/// `hosts`: the first ranks of hosts, of which sums may be.
inline std::vector<Cell> draw_cells(std::mt19937_64& random, int ranks,
                                    const std::vector<int>& hosts = {}) {
  std::vector<Cell> cells;
  for (const Kind& kind : all_kinds()) {
    for (std::size_t count : counts_of(kind.op, kind.dtype, ranks)) {
      const bool large =
          count * size_of(kind.dtype) > 100'000;  // a sample has room for only a few of them
      if (!large || testing::long_tests() || random() % 4 == 0)
        cells.push_back({kind.op, kind.dtype, kind.reduce, count, random(), ranks});
    }
  }
  std::shuffle(cells.begin(), cells.end(), random);
  for (Cell& cell : cells) cell.hosts = hosts;
  return cells;
}

}  // namespace muster::collective::suite
