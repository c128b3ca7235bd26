// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "core/collective/op.h"
#include "core/collective/plan/plan.h"

namespace muster::collective::plan {

/// Ranks numbered host by host, any number on each. Every rank owns a piece of the data, or every
/// rank that is not on the root's host (`hosts_plan_of`). Each piece is handled by one rank of each
/// host, which sums it for its host before it leaves the host, and distributes it within the host
/// when it arrives. On its own host that is its owner. On a host of n ranks that is another host
/// than the owner's, it is the rank at place p mod n for piece p: with the same number of ranks on
/// all hosts, the rank at the owner's place. So a host sends and receives every byte once, however
/// many ranks it has, and its ranks handle equally many pieces, give or take one.
class HostsPlan {
 public:
  /// `first_ranks`: of each host, in order; the plan does not own them. Empty: every rank has a
  /// host of its own. `root`: whose host owns nothing; -1: all hosts own pieces.
  HostsPlan(int rank, int size, std::span<const int> first_ranks = {}, int root = -1)
      : rank(rank), size(size), first_ranks_(first_ranks), host_(host_of(rank)) {
    if (root < 0) return;
    root_host_ = host_of(root);
    unowned_ = ranks_on(root_host_);
  }

  int rank;
  int size;

  int hosts() const { return first_ranks_.empty() ? size : static_cast<int>(first_ranks_.size()); }
  int host() const { return host_; }
  int place() const { return rank - first(host_); }
  int ranks_here() const { return ranks_on(host_); }
  /// At least one, which the maximum tells the static analyzer.
  int ranks_on(int host) const { return std::max(1, first(host + 1) - first(host)); }
  int most_on_a_host() const {
    int most = 1;
    for (int host = 0; host < hosts() && !first_ranks_.empty(); ++host)
      most = std::max(most, ranks_on(host));
    return most;
  }
  int host_of(int other) const {
    if (first_ranks_.empty()) return other;
    return static_cast<int>(std::ranges::upper_bound(first_ranks_, other) - first_ranks_.begin()) -
           1;
  }
  /// The first rank of `host`; `size` for the host after the last.
  int first(int host) const {
    if (host == hosts()) return size;
    return first_ranks_.empty() ? host : first_ranks_[static_cast<std::size_t>(host)];
  }
  /// The rank at `place` on this host.
  int neighbour(int place) const { return first(host_) + place; }
  /// The `index`-th place, or host, without this rank's own.
  int other_place(int index) const { return index < place() ? index : index + 1; }
  int other_host(int index) const { return index < host_ ? index : index + 1; }

  int pieces() const { return size - unowned_; }
  bool owns(int host) const { return host != root_host_; }
  int piece_of(int owner) const { return owner < first_unowned() ? owner : owner - unowned_; }
  int owner_of(int piece) const { return piece < first_unowned() ? piece : piece + unowned_; }

  /// The rank that handles the piece of `owner` on `host`.
  int handler(int host, int owner) const {
    const int first_rank = first(host), ranks = ranks_on(host);
    if (owner >= first_rank && owner < first_rank + ranks) return owner;
    return first_rank + piece_of(owner) % ranks;
  }
  /// How many pieces the rank at `place` on this host handles.
  int handled_by(int place) const { return handled_before(place, pieces()); }
  /// The owner of the `index`-th piece that it handles, in order of pieces.
  int handled_by(int place, int index) const {
    return index == own_index(place) ? neighbour(place) : owner_of(place + index * ranks_here());
  }
  /// The index of its own piece; -1 on a host that owns none.
  int own_index(int place) const {
    return owns(host_) ? handled_before(place, piece_of(first(host_))) : -1;
  }
  /// For this rank. `handled_elsewhere` leaves out its own piece.
  int handled() const { return handled_by(place()); }
  int handled(int index) const { return handled_by(place(), index); }
  int own_index() const { return own_index(place()); }
  int handled_elsewhere() const { return handled() - (owns(host_) ? 1 : 0); }
  int handled_elsewhere(int index) const {
    return handled(!owns(host_) || index < own_index() ? index : index + 1);
  }

  /// Bytes of a piece that move at a time: enough rounds to keep the hosts and the wires between
  /// them busy at once, but no message below the smallest worthwhile one; less among many ranks,
  /// which each take a buffer. Hosts of one rank have no work within them to overlap with the wire.
  ///
  /// `in_flight`: what a long way takes (`Selection::in_flight`), of all pieces for other hosts
  /// together; 0: the way is short. Chunks are then longer, but a piece still moves in rounds.
  std::size_t chunk_bytes(std::size_t piece, std::size_t in_flight = 0) const {
    const bool shared = hosts() < size;
    const std::size_t usual = std::clamp(fixed::kGatheredMost / static_cast<std::size_t>(size),
                                         fixed::kLeastMessage, fixed::kHostChunk);
    const auto elsewhere = static_cast<std::size_t>(std::max(1, size - size / hosts()));
    const std::size_t far = in_flight / fixed::kForwardDepth / elsewhere;
    const std::size_t part =
        in_flight > 0 ? whole_part(piece, fixed::kForwardDepth) : piece / fixed::kForwardDepth;
    return std::clamp(part, shared ? fixed::kLeastMessage : usual, std::max(usual, far));
  }

 private:
  int first_unowned() const { return root_host_ < 0 ? size : first(root_host_); }
  /// How many of the pieces below `piece` are `place` modulo the ranks of this host. Exactly one of
  /// this host's own pieces is; the rank at `place` handles its own piece instead.
  int handled_before(int place, int piece) const {
    return piece <= place ? 0 : (piece - place + ranks_here() - 1) / ranks_here();
  }

  std::span<const int> first_ranks_;
  int host_;
  int root_host_ = -1;  // owns nothing
  int unowned_ = 0;     // its ranks
};

/// The plan of `op`. In a broadcast, and in a reduce over more than two hosts, the root's host owns
/// nothing: its network carries all data anyway, in one of the directions. In a reduce between two
/// hosts both own pieces; otherwise the other host would receive everything and send it all back.
inline HostsPlan hosts_plan_of(Op op, int rank, int size, std::span<const int> first_ranks,
                               int root) {
  const int hosts = HostsPlan(rank, size, first_ranks).hosts();
  const bool root_host_owns_nothing = op == Op::broadcast || (op == Op::reduce && hosts > 2);
  return {rank, size, first_ranks, root_host_owns_nothing ? root : -1};
}

}  // namespace muster::collective::plan
