/// Who gives and who takes in a call, and in which pieces: what follows from the call's operation,
/// sizes and root, and from the group. Pure functions of that.
#pragma once

#include <cstddef>
#include <cstring>

#include "muster/base/bytes.h"
#include "muster/collective/communicator.h"
#include "muster/collective/kernels.h"
#include "muster/shm/copy_past_caches.h"
#include "muster/shm/segment_layout.h"
#include "muster/wait/topology.h"

namespace muster::collective::region {

/// A call whose data only moves towards its readers.
struct TransferPlan {
  bool gives = false;
  bool lists = false;          ///< a slice for each member
  bool combines = false;       ///< the readers reduce what they take
  bool scaled = false;         ///< premul_sum: what is given is the product
  bool single_reader = false;  ///< each giver's data, and it has more than one reader in all
  bool reclaims = false;  ///< this member reclaims the lines of what it reads where that is staged
  bool past_caches = false;         ///< all members together write more than the caches hold
  bool stages_past_caches = false;  ///< so does the giver when it stages
  int reader = -1;                  ///< the only one; -1: everybody else
  int first = 0, last = 0;          ///< takes from members [first, last)
  std::size_t chunk = 0;            ///< bytes of a step
  std::size_t takes = 0;            ///< steps of what is taken
};

class TransferPlanner {
 public:
  TransferPlanner(const Topology& topology, const shm::SegmentLayout& layout, int rank)
      : topology_(topology), layout_(layout), rank_(rank) {}

  TransferPlan plan(const Args& args) const;

  /// Whether several readers of the same lines each reclaim them, in a call in which all members
  /// together write so much.
  bool several_reclaim(Op op, std::size_t written) const;
  /// Whether members stage copies of so much that each gives, though it stands in the arena.
  bool copies_from_arena(Op op, std::size_t given) const;

 private:
  int size() const { return static_cast<int>(layout_.members); }
  std::size_t relayed_chunk(const Args& args, const TransferPlan& plan) const;
  bool reclaims(const Args& args, const TransferPlan& plan) const;

  const Topology topology_;
  const shm::SegmentLayout& layout_;
  const int rank_;
};

/// What this member gives `reader`.
inline ConstBytes given_to(const Args& args, const TransferPlan& plan, int reader) {
  if (args.op == Op::broadcast) return args.outputs[0];
  const std::size_t index = plan.lists ? static_cast<std::size_t>(reader) : 0;
  return index < args.inputs.size() ? args.inputs[index] : ConstBytes();
}

/// Where this member takes, or reduces, what `source` gives.
inline MutableBytes taken_from(const Args& args, int source) {
  const std::size_t index = info(args.op).lists_output ? static_cast<std::size_t>(source) : 0;
  return index < args.outputs.size() ? args.outputs[index] : MutableBytes();
}

inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes,
                       bool past_caches = false) {
  if (bytes == 0 || to == from) return;
  if (past_caches) {
    shm::copy_past_caches(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

/// Puts a part of what this member gives into its line, slot or window.
inline void stage(const Args& args, const TransferPlan& plan, std::byte* to, ConstBytes from) {
  if (!plan.scaled) return copy_bytes(to, from.data(), from.size(), plan.stages_past_caches);
  scale(to, from.data(), elements_in(from.size(), args.dtype), args.dtype, args.factor);
}

/// Copies what a member gives itself, if nothing is reduced.
void copy_own(const Args& args, const TransferPlan& plan, int rank);

/// Steps of `chunk`. Nearly always one or none, for which a division would cost more than the rest.
inline std::size_t chunks_in(std::size_t bytes, std::size_t chunk) {
  if (bytes <= chunk) return bytes == 0 ? 0 : 1;
  return (bytes + chunk - 1) / chunk;
}

}  // namespace muster::collective::region
