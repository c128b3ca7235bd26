// SPDX-License-Identifier: BSD-3-Clause
/// Runs the schedules of all ranks against each other without data: every rank holds sets of
/// contributions, and every message moves one. Returns an error text, or "".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lab/model/schedule.h"

namespace muster::collective::plan {

/// A set of (rank, member) pairs, one bit each.
class Table {
 public:
  explicit Table(int size)
      : size_(static_cast<std::size_t>(size)), words_((size_ * size_ + 63) / 64), counts_(size_) {}
  bool has(int rank, int member) const {
    return (words_[at(rank, member) / 64] >> at(rank, member) % 64 & 1) != 0;
  }
  /// False if it was already in the set.
  bool add(int rank, int member) {
    if (has(rank, member)) return false;
    words_[at(rank, member) / 64] |= std::uint64_t{1} << at(rank, member) % 64;
    ++counts_[static_cast<std::size_t>(rank)];
    return true;
  }
  int count(int rank) const { return counts_[static_cast<std::size_t>(rank)]; }

 private:
  std::size_t at(int rank, int member) const {
    return static_cast<std::size_t>(rank) * size_ + static_cast<std::size_t>(member);
  }
  std::size_t size_;
  std::vector<std::uint64_t> words_;
  std::vector<int> counts_;
};

/// `Plans` returns the schedule of each rank: `plans(rank)` has steps(), sends(step), send(step,
/// index), receives(step), receive(step, index).
template <class Plans>
class Proof {
 public:
  Proof(Op op, int size, int root, const Plans& plans)
      : op_(op),
        size_(size),
        root_(root),
        plans_(plans),
        blocks_(size),
        pieces_(size),
        results_(size),
        whole_(index(size)),
        payloads_sent_(index(size)),
        step_(index(size), -1) {
    for (int rank = 0; rank < size; ++rank) {
      sums_of_all_.push_back({rank, 1});
      blocks_.add(rank, rank);
      if (op != Op::scatter) pieces_.add(rank, rank);
      whole_[index(rank)] = rank == root;
      if (op == Op::scatter) pieces_.add(root, rank);
      if (op == Op::broadcast) results_.add(root, rank);
    }
    if (op == Op::reduce_scatter || op == Op::reduce || op == Op::all_reduce) {
      for (int rank = 0; rank < size; ++rank) reduce(rank);  // with one rank, everything is there
    }
  }

  /// Returns an error text, or "".
  std::string run() {
    for (int rank = 0; rank < size_ && wrong_.empty(); ++rank) enter(rank, 0);
    for (bool moved = true; moved && wrong_.empty();) {
      moved = false;
      for (int rank = 0; rank < size_ && wrong_.empty(); ++rank) {
        while (wrong_.empty() && step_[index(rank)] < plans_(rank).steps() && complete(rank)) {
          enter(rank, step_[index(rank)] + 1);
          moved = true;
        }
      }
    }
    for (int rank = 0; rank < size_ && wrong_.empty(); ++rank) {
      if (step_[index(rank)] < plans_(rank).steps())
        wrong_ = "rank " + std::to_string(rank) + " waits for ever in step " +
                 std::to_string(step_[index(rank)]);
    }
    if (wrong_.empty() && sent_ != received_)
      wrong_ = std::to_string(sent_ - received_) + " messages are taken by nobody";
    for (int rank = 0; rank < size_ && wrong_.empty(); ++rank) {
      if (!ends_right(rank))
        wrong_ = "rank " + std::to_string(rank) + " does not end with what it should";
    }
    return wrong_;
  }

 private:
  using Kind = Payload::Kind;
  /// A sum over `count` ranks from `first` on.
  struct Sum {
    int first = 0, count = 0;
  };
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

  void fail(int rank, int step, const std::string& what) {
    wrong_ = "rank " + std::to_string(rank) + ", step " + std::to_string(step) + ": " + what;
  }

  Sum& sum(int rank, int slice) {
    if (slice < 0) return sums_of_all_[index(rank)];
    if (sums_.empty()) sums_.resize(index(size_) * index(size_));
    Sum& found = sums_[index(rank) * index(size_) + index(slice)];
    if (found.count == 0) found = {rank, 1};
    return found;
  }

  bool holds(int rank, int to, const Payload& payload) {
    const auto all = [&](const Table& table) {
      for (int i = 0; i < payload.count; ++i) {
        if (!table.has(rank, wrap(payload.first + i, size_))) return false;
      }
      return payload.count > 0 && payload.count <= size_;
    };
    switch (payload.kind) {
      case Kind::token:
      case Kind::block: return all(blocks_);
      case Kind::whole: return whole_[index(rank)];
      case Kind::piece: return payload.first == rank && op_ != Op::scatter && to >= 0;
      case Kind::pieces: return op_ == Op::scatter && all(pieces_);
      case Kind::partial:
        return sum(rank, payload.slice).first == payload.first &&
               sum(rank, payload.slice).count == payload.count;
      case Kind::result:
        return payload.slice < 0 ? sum(rank, -1).count == size_
                                 : payload.slice < size_ && results_.has(rank, payload.slice);
    }
    return false;
  }

  void enter(int rank, int step) {
    step_[index(rank)] = step;
    const auto plan = plans_(rank);
    if (step >= plan.steps()) return;
    for (int i = 0; i < plan.sends(step); ++i) {
      const PlannedTransfer out = plan.send(step, i);
      if (out.peer < 0 || out.peer >= size_ || out.peer == rank)
        return fail(rank, step, "sends to " + std::to_string(out.peer));
      if (!holds(rank, out.peer, out.payload))
        return fail(rank, step, "sends what it does not have");
      if (out.payload.kind == Kind::result) ++payloads_sent_[index(rank)];
      if (out.payload.kind == Kind::block || out.payload.kind == Kind::pieces)
        payloads_sent_[index(rank)] += out.payload.count;
      ++sent_;
    }
  }

  static bool fits(const PlannedTransfer& out, int to, const Payload& payload) {
    return out.peer == to && out.payload == payload;
  }

  /// Whether the message has left its sender.
  bool has_arrived(int rank, int step, int place, const PlannedTransfer& in) {
    const auto sender = plans_(in.peer);
    const int reached = step_[index(in.peer)];
    // In most plans, the i-th message of a step is about the peer's i-th of the same step, or its
    // message for the i-th rank after it.
    const int sends = step < sender.steps() ? sender.sends(step) : 0;
    const auto is_sent = [&](int guess) {
      return guess >= 0 && guess < sends && fits(sender.send(step, guess), rank, in.payload);
    };
    if (is_sent(wrap(rank - in.peer, size_) - 1)) return step <= reached;
    for (int away = 0; away < sends; ++away)
      if (is_sent(place - away) || is_sent(place + away)) return step <= reached;
    for (int other = 0; other < sender.steps() && other <= reached; ++other) {
      for (int i = 0; i < sender.sends(other); ++i) {
        if (fits(sender.send(other, i), rank, in.payload)) return true;
      }
    }
    return false;
  }

  bool complete(int rank) {
    const int step = step_[index(rank)];
    const auto plan = plans_(rank);
    for (int i = 0; i < plan.receives(step); ++i) {
      const PlannedTransfer in = plan.receive(step, i);
      if (in.peer < 0 || in.peer >= size_ || in.peer == rank) {
        fail(rank, step, "receives from " + std::to_string(in.peer));
        return false;
      }
      if (!has_arrived(rank, step, i, in)) return false;
    }
    for (int i = 0; i < plan.receives(step); ++i) {
      if (!accept(rank, plan.receive(step, i).payload)) {
        fail(rank, step, "gets what it has, or what is of no use to it");
        return false;
      }
      ++received_;
    }
    reduce(rank);
    return true;
  }

  bool accept(int rank, const Payload& payload) {
    switch (payload.kind) {
      case Kind::token:
        for (int i = 0; i < payload.count; ++i) blocks_.add(rank, wrap(payload.first + i, size_));
        return true;
      case Kind::block:
        for (int i = 0; i < payload.count; ++i) {
          if (!blocks_.add(rank, wrap(payload.first + i, size_))) return false;
        }
        return true;
      case Kind::whole:
        if (whole_[index(rank)]) return false;
        whole_[index(rank)] = true;
        return true;
      case Kind::piece: return pieces_.add(rank, payload.first);
      case Kind::pieces:
        for (int i = 0; i < payload.count; ++i) {
          if (!pieces_.add(rank, wrap(payload.first + i, size_))) return false;
        }
        return true;
      case Kind::partial: return merge(sum(rank, payload.slice), payload);
      case Kind::result:
        if (payload.slice >= 0) return results_.add(rank, payload.slice);
        // To a rank that has sent its part.
        if (sum(rank, -1).count == size_) return false;
        sum(rank, -1).count = size_;
        return true;
    }
    return false;
  }

  /// Merges adjacent ranges.
  bool merge(Sum& mine, const Payload& theirs) const {
    if (mine.count + theirs.count > size_) return false;
    if (wrap(theirs.first + theirs.count, size_) == mine.first) {
      mine.first = theirs.first;
    } else if (wrap(mine.first + mine.count, size_) != theirs.first) {
      return false;
    }
    mine.count += theirs.count;
    if (mine.count == size_ && theirs.slice < 0) mine.first = 0;
    return true;
  }

  void reduce(int rank) {
    if (op_ != Op::reduce_scatter && op_ != Op::reduce && op_ != Op::all_reduce) return;
    if (pieces_.count(rank) == size_) results_.add(rank, rank);
    for (int slice = 0; !sums_.empty() && slice < size_; ++slice) {
      if (sums_[index(rank) * index(size_) + index(slice)].count == size_)
        results_.add(rank, slice);
    }
  }

  bool ends_right(int rank) {
    const int slices = plans_(rank).slices();
    const bool everything = blocks_.count(rank) == size_ || results_.count(rank) == slices ||
                            sum(rank, -1).count == size_;
    const bool nothing =
        size_ > 1 && blocks_.count(rank) == 1 && (results_.count(rank) < slices || slices == 1);
    switch (op_) {
      case Op::barrier:
      case Op::all_gather: return blocks_.count(rank) == size_;
      case Op::broadcast: return whole_[index(rank)] || results_.count(rank) == slices;
      case Op::all_reduce: return everything;
      case Op::reduce: return rank == root_ ? everything : nothing;
      // Along a path through other ranks, each has forwarded all that it has, or all but its own.
      case Op::gather:
        return rank == root_ ? everything : blocks_.count(rank) == payloads_sent_[index(rank)];
      case Op::scatter:
        return pieces_.has(rank, rank) && pieces_.count(rank) == 1 + payloads_sent_[index(rank)];
      // A rank that sends results to others has seen them.
      case Op::reduce_scatter:
        return results_.has(rank, rank) && results_.count(rank) <= 1 + payloads_sent_[index(rank)];
      case Op::all_to_all: return pieces_.count(rank) == size_;
      default: return false;
    }
  }

  const Op op_;
  const int size_, root_;
  const Plans& plans_;
  Table blocks_, pieces_, results_;  // pieces: by sender; for a scatter by receiver
  std::vector<bool> whole_;
  std::vector<int> payloads_sent_;  // results, blocks and pieces sent, by rank
  std::vector<Sum> sums_;           // by rank and slice; created on first use
  std::vector<Sum> sums_of_all_;
  std::vector<int> step_;
  std::int64_t sent_ = 0, received_ = 0;
  std::string wrong_;
};

template <class Plans>
std::string prove(Op op, int size, int root, const Plans& plans) {
  return Proof<Plans>(op, size, root, plans).run();
}

}  // namespace muster::collective::plan
