/// Which algorithm runs: the algorithms of every operation and the sizes at which one gives way to
/// the next.
///
/// A group's `Selection` is made by its first member, of the defaults here or of a tuning file
/// (`tuning.h`), and handed to all others when the group is made; where the first member's proposal
/// came with another call, by every member, of the defaults, which go by what all know alike.
/// Members never choose differently. Every algorithm computes the same bits.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "muster/base/tunables.h"
#include "muster/collective/communicator.h"
#include "muster/collective/op.h"

namespace muster::collective {

enum class Algorithm : std::uint8_t {
  dissemination,
  tree,   ///< down a binomial tree, chunk behind chunk; pieces go up or down it, those of a subtree
          ///< together
  chain,  ///< from each rank to the next, chunk behind chunk
  bruck,  ///< everybody gathers everything in log2(ranks) steps
  direct,  ///< straight to whom it concerns
  ring,
  slices,    ///< every member reduces one slice and hands it to whom it concerns
  one_shot,  ///< region: every reader reduces everything for itself
  shares,    ///< region: every member reduces its share of each window
  pull,      ///< region: readers take what they need
  recursive_doubling,
  hosts,  ///< sums go from host to host; where members stand host by host
};
inline constexpr int kAlgorithms = 12;
std::string_view name_of(Algorithm algorithm);
std::optional<Algorithm> algorithm_named(std::string_view name);
/// Of a collective.
std::optional<Op> op_named(std::string_view name);

/// What the calls of a group run over.
enum class Medium : std::uint8_t { network, shared_memory };
std::string_view name_of(Medium medium);

/// Operations that have algorithms: all but send and recv.
inline constexpr int kCollectives = static_cast<int>(Op::send);

/// The algorithms of a collective, those for small calls first.
std::span<const Algorithm> algorithms_of(Medium medium, Op op);
/// The largest call that this algorithm is used for, whatever a tuning file says: what it needs is
/// limited. In bytes as in `selected_bytes`.
std::uint64_t most_bytes(Medium medium, Op op, Algorithm algorithm, int ranks);

/// The size by which an algorithm is chosen; equal on all members where there is a choice. The
/// tensor of a reduction or a broadcast; all pieces together where an operation gathers, or each
/// member gets one. `ranks`: of the group; a member may know its own piece alone.
std::uint64_t selected_bytes(const Args& args, int ranks);

/// Of a group whose members are on these hosts, in this order: how many are on each, where those of
/// a host stand side by side, as many on each; all of them where there is one host. Else 1.
int ranks_per_host(std::span<const int> hosts);

/// Where a group's members stand; the same to all of them.
struct GroupPlacement {
  int per_host = 1;  ///< `ranks_per_host`
  int per_core = 1;  ///< of a group on one host: `ranks_per_core`

  bool several_on_each_host(int ranks) const { return per_host > 1 && per_host < ranks; }
};

class Selection {
 public:
  static constexpr std::uint64_t kAlways = std::numeric_limits<std::uint64_t>::max();
  /// By operation, for each of its algorithms but the last: calls of fewer bytes are its, of those
  /// that are left to it. Goes over the wire as it is.
  using Bounds = std::array<std::array<std::uint64_t, 2>, kCollectives>;

  /// The defaults, by the numbers of `table`: a group's first member takes those in force, what
  /// every member must find by itself goes by `default_tunables()`.
  Selection(Medium medium, int ranks, GroupPlacement placement = {},
            const Tunables& table = tunables());
  /// What another member has decided.
  Selection(Medium medium, int ranks, const Bounds& bounds, GroupPlacement placement = {})
      : medium_(medium), ranks_(ranks), placement_(placement), bounds_(bounds) {}

  Medium medium() const { return medium_; }
  int ranks() const { return ranks_; }
  int ranks_per_host() const { return placement_.per_host; }
  const Bounds& bounds() const { return bounds_; }
  Algorithm choose(Op op, std::uint64_t bytes) const {
    const auto row = algorithms_of(medium_, op);
    std::size_t k = 0;
    while (k + 1 < row.size() && bytes >= bounds_[static_cast<std::size_t>(op)][k]) ++k;
    return row[k] == Algorithm::hosts && !placement_.several_on_each_host(ranks_)
               ? Algorithm::slices
               : row[k];
  }

  /// `algorithm` for calls of fewer than `bound` bytes that no algorithm before it takes; as far as
  /// it goes (`most_bytes`). The last algorithm of an operation has no bound.
  void set_bound(Op op, Algorithm algorithm, std::uint64_t bound);
  /// `algorithm` for every size that it can do. Nothing where the operation does not have it here.
  void force(Op op, Algorithm algorithm);

 private:
  Medium medium_;
  int ranks_;
  GroupPlacement placement_;
  Bounds bounds_{};
};

/// What it chooses, for people: a line for each operation that has a choice.
std::string text_of(const Selection& selection);

}  // namespace muster::collective
