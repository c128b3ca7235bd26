// SPDX-License-Identifier: BSD-3-Clause
/// Algorithm selection: the algorithms of every operation, and the sizes at which one takes over
/// from the next.
///
/// Rank 0 of the group chooses the `Selection` (defaults or tuning file, `tuning.h`) and sends it
/// to the others at creation. Groups created by piggybacking use the defaults, which every member
/// computes identically. Members never choose differently. Every algorithm but `hosts` computes
/// the same bits.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/collective/communicator.h"
#include "core/collective/op.h"
#include "core/net/link_figures.h"
#include "core/tunables/tunables.h"

namespace muster::collective {

enum class Algorithm : std::uint8_t {
  dissemination,
  tree,    ///< along a binomial tree, pipelined in chunks; a subtree's pieces share a message
  chain,   ///< from each rank to the next, pipelined in chunks
  bruck,   ///< all-gather in log2(ranks) steps
  direct,  ///< directly to the destination
  ring,
  slices,    ///< every member reduces one slice and sends it to the members that need it
  one_shot,  ///< region: every reader reduces everything
  shares,    ///< region: every member reduces its share of each window
  pull,      ///< region: readers copy what they need
  hosts,     ///< within and between hosts, so that each byte leaves a host once
};
inline constexpr int kAlgorithms = 11;
std::string_view name_of(Algorithm algorithm);
std::optional<Algorithm> algorithm_named(std::string_view name);
/// Accepts collectives only.
std::optional<Op> op_named(std::string_view name);

/// The medium that the calls of a group run over.
enum class Medium : std::uint8_t { network, shared_memory };
std::string_view name_of(Medium medium);

/// Operations with algorithms: all but send and recv.
inline constexpr int kCollectives = static_cast<int>(Op::send);

/// Whether a call with a compression encodes what it sends over this medium. In shared memory the
/// ordinary call is faster at every size, because encoding costs more than the copies it saves.
bool pays_to_compress(Medium medium);

/// The algorithms of a collective, in order of size.
std::span<const Algorithm> algorithms_of(Medium medium, Op op);
/// The largest call that this algorithm may be used for, whatever a tuning file says, because its
/// memory is bounded. In bytes as in `selected_bytes`.
std::uint64_t most_bytes(Medium medium, Op op, Algorithm algorithm, int ranks);

/// The size by which an algorithm is chosen; equal on all members if there is a choice. For a
/// reduction or a broadcast, the tensor; for operations that gather or scatter, all pieces
/// together. `ranks`: of the group, because a member may know only its own piece.
std::uint64_t selected_bytes(const Args& args, int ranks);

/// The first rank of each host of a group whose members are on these hosts, in this order. Empty
/// unless the members of every host are contiguous.
std::vector<int> first_ranks_of_hosts(std::span<const int> hosts);
/// The same with `per_host` ranks on every host. The last has what is left.
std::vector<int> even_hosts(int ranks, int per_host);

/// The hosts and cores of a group's members; the same on all of them.
struct GroupPlacement {
  std::vector<int> first_ranks;  ///< of its hosts; empty: as if each rank had a host of its own
  int per_core = 1;              ///< for a group on one host: `ranks_per_core`
  /// Connections that the longest link between two members needs; more than one: a long way.
  std::uint64_t strands = 1;
  /// A ring through the members goes by these ranks: the fastest that their links make. Empty: in
  /// the order of ranks.
  std::vector<std::uint8_t> order = {};

  int hosts(int ranks) const {
    return first_ranks.empty() ? ranks : static_cast<int>(first_ranks.size());
  }
  /// Whether there are several hosts, and several ranks on one of them.
  bool shares_hosts(int ranks) const { return hosts(ranks) > 1 && hosts(ranks) < ranks; }
};

class Selection {
 public:
  static constexpr std::uint64_t kAlways = std::numeric_limits<std::uint64_t>::max();
  /// Per operation, for each of its algorithms but the last: it takes calls of fewer bytes than
  /// this that no earlier algorithm takes. Also the wire format.
  using Bounds = std::array<std::array<std::uint64_t, 3>, kCollectives>;

  /// The defaults, by the numbers of `table`. A group's first member uses those in force; a
  /// selection that every member must compute identically uses `default_tunables()`.
  Selection(Medium medium, int ranks, GroupPlacement placement = {},
            const Tunables& table = tunables());
  /// A selection received from another member.
  Selection(Medium medium, int ranks, const Bounds& bounds, GroupPlacement placement = {})
      : medium_(medium), ranks_(ranks), placement_(std::move(placement)), bounds_(bounds) {}

  Medium medium() const { return medium_; }
  int ranks() const { return ranks_; }
  std::span<const int> first_ranks() const { return placement_.first_ranks; }
  std::span<const std::uint8_t> order() const { return placement_.order; }
  const Bounds& bounds() const { return bounds_; }
  /// Bytes that a member keeps on the wire in the calls that move in chunks, for all other members
  /// together, because their way is long; 0: the usual chunks suffice. No choice depends on it.
  std::size_t in_flight() const {
    const std::uint64_t strands = std::min<std::uint64_t>(placement_.strands, kMostStrands);
    return strands > 1 ? strands * fixed::kStrandWindow : 0;
  }
  Algorithm choose(Op op, std::uint64_t bytes) const {
    const auto row = algorithms_of(medium_, op);
    std::size_t k = 0;
    while (k + 1 < row.size() && bytes >= bounds_[static_cast<std::size_t>(op)][k]) ++k;
    return row[k] == Algorithm::hosts && !goes_by_hosts(op) ? row[k - 1] : row[k];
  }

  /// Uses `algorithm` for calls of fewer than `bound` bytes that no earlier algorithm takes, up to
  /// its `most_bytes`. The last algorithm of an operation has no bound.
  void set_bound(Op op, Algorithm algorithm, std::uint64_t bound);
  /// Uses `algorithm` for every size that it supports. No-op if the operation does not have it on
  /// this medium.
  void force(Op op, Algorithm algorithm);

 private:
  /// Whether there are several hosts, and a byte would leave one of them more than once.
  bool goes_by_hosts(Op op) const {
    return placement_.shares_hosts(ranks_) || (op == Op::broadcast && placement_.hosts(ranks_) > 2);
  }

  Medium medium_;
  int ranks_;
  GroupPlacement placement_;
  Bounds bounds_{};
};

/// The choices as text: one line per operation that has a choice.
std::string text_of(const Selection& selection);

}  // namespace muster::collective
