// SPDX-License-Identifier: BSD-3-Clause
/// The memory that a rank needs to train a sharded model: arithmetic, without a model.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace muster::parallel {

struct MemoryPlanOptions {
  int ranks = 1;  ///< that share the parameters; with hybrid sharding those of one row
  bool keeps_after_forward = false;             ///< SHARD_GRAD_OP
  int part_ranks = 0;                           ///< reshard_after_forward as a number; 0: freed
  int gathered_ahead = 1;                       ///< units; 0 without prefetch
  std::int64_t bytes_per_element = 4;           ///< of shards and their gradients
  std::int64_t gathered_bytes_per_element = 4;  ///< of whole parameters (param_dtype)
  std::int64_t reduced_bytes_per_element = 4;   ///< of gradients on their way (reduce_dtype)
  double optimizer_states = 2;  ///< tensors as large as the parameters: Adam 2, SGD 0 or 1
};

/// Bytes of one rank. The sum of the first three is what stays between steps.
struct MemoryPlan {
  std::int64_t parameters = 0, gradients = 0, optimizer = 0;
  std::int64_t gathered_peak = 0;  ///< whole parameters at one time
  std::int64_t staging_peak = 0;   ///< whole gradients of a unit and the buffers of their reduction
};

/// `units` are the elements of each unit's parameters, in the order of forward; `outer` those of
/// the unit around them, which stay whole throughout a pass. Without alignment and without
/// activations, which depend on the batch. The larger units decide the two peaks.
MemoryPlan plan_memory(std::int64_t outer, const std::vector<std::int64_t>& units,
                       const MemoryPlanOptions& options);

}  // namespace muster::parallel
