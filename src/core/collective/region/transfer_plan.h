// SPDX-License-Identifier: BSD-3-Clause
/// Which members send and receive in a call, and in which chunks: pure functions of the call's
/// operation, sizes and root, and of the group.
#pragma once

#include <cstddef>
#include <cstring>

#include "core/base/bytes.h"
#include "core/collective/communicator.h"
#include "core/collective/kernels/kernels.h"
#include "core/shm/cache_lines.h"
#include "core/shm/segment_layout.h"
#include "core/wait/topology.h"

namespace muster::collective::region {

/// A call that only moves data towards its readers.
struct TransferPlan {
  bool sends = false;
  bool per_member = false;          ///< the input has one slice per member
  bool combines = false;            ///< readers reduce the data that they read
  bool scaled = false;              ///< premul_sum: the data is the product
  bool single_reader = false;       ///< each slice has one reader; all members share the copying
  bool reclaims = false;            ///< this member reclaims the lines of staged data that it reads
  bool past_caches = false;         ///< all members together write more than the caches hold
  bool stages_past_caches = false;  ///< the sender also stages with streaming stores
  int reader = -1;                  ///< the only reader; -1: all others
  int first = 0, last = 0;          ///< reads from members [first, last)
  std::size_t chunk = 0;            ///< bytes per step
  std::size_t read_steps = 0;       ///< number of steps that read
};

class TransferPlanner {
 public:
  TransferPlanner(const Topology& topology, const shm::SegmentLayout& layout, int rank)
      : topology_(topology), layout_(layout), rank_(rank) {}

  TransferPlan plan(const Args& args) const;

  /// Whether several readers reclaim the same lines in a call that writes `written` bytes on all
  /// members together.
  bool concurrent_reclaim(Op op, std::size_t written) const;
  /// Whether members stage copies of inputs that are in the arena, for inputs of `given` bytes
  /// each.
  bool copies_from_arena(Op op, std::size_t given) const;

 private:
  int size() const { return static_cast<int>(layout_.members); }
  std::size_t relayed_chunk(const Args& args, const TransferPlan& plan) const;
  bool reclaims(const Args& args, const TransferPlan& plan) const;

  const Topology topology_;
  const shm::SegmentLayout& layout_;
  const int rank_;
};

/// This member's data for `reader`.
inline ConstBytes input_for(const Args& args, const TransferPlan& plan, int reader) {
  if (args.op == Op::broadcast) return args.outputs[0];
  const std::size_t index = plan.per_member ? static_cast<std::size_t>(reader) : 0;
  return index < args.inputs.size() ? args.inputs[index] : ConstBytes();
}

/// The output into which this member copies or reduces the data of `source`.
inline MutableBytes output_for(const Args& args, int source) {
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

/// Copies a part of this member's data into its line, slot or window.
inline void stage(const Args& args, const TransferPlan& plan, std::byte* to, ConstBytes from) {
  if (!plan.scaled) return copy_bytes(to, from.data(), from.size(), plan.stages_past_caches);
  scale(to, from.data(), elements_in(from.size(), args.dtype), args.dtype, args.factor);
}

/// Copies this member's own slice to itself, unless the operation reduces.
void copy_own(const Args& args, const TransferPlan& plan, int rank);

/// Number of steps of `chunk`. Nearly always 0 or 1, so the division is avoided.
inline std::size_t chunks_in(std::size_t bytes, std::size_t chunk) {
  if (bytes <= chunk) return bytes == 0 ? 0 : 1;
  return (bytes + chunk - 1) / chunk;
}

}  // namespace muster::collective::region
