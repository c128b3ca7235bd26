// SPDX-License-Identifier: BSD-3-Clause
#include "train/fsdp/sharded_plan.h"

#include <algorithm>
#include <numeric>

namespace muster::parallel {
namespace {

std::int64_t divided(std::int64_t bytes, std::int64_t by) { return (bytes + by - 1) / by; }

/// The most elements there at once: `window` neighbouring units, and of these and of those before
/// them what is kept for backward, until a unit computes.
std::int64_t most_gathered(const std::vector<std::int64_t>& units, std::size_t window,
                           int kept_by) {
  std::int64_t most = 0, before = 0;
  for (std::size_t i = 0; i < units.size(); ++i) {
    const auto end = std::min(units.size(), i + window);
    const auto whole =
        std::accumulate(units.begin() + static_cast<std::ptrdiff_t>(i),
                        units.begin() + static_cast<std::ptrdiff_t>(end), std::int64_t{0});
    const std::int64_t computing = window > 1 ? units[end - 1] : 0;
    most = std::max(most, whole + (kept_by > 0 ? divided(before + whole - computing, kept_by) : 0));
    before += units[i];
  }
  return most;
}

}  // namespace

MemoryPlan plan_memory(std::int64_t outer, const std::vector<std::int64_t>& units,
                       const MemoryPlanOptions& options) {
  const std::int64_t all = std::accumulate(units.begin(), units.end(), outer);
  const std::int64_t share = divided(all, options.ranks);
  MemoryPlan plan;
  plan.parameters = plan.gradients = share * options.bytes_per_element;
  plan.optimizer =
      static_cast<std::int64_t>(static_cast<double>(plan.parameters) * options.optimizer_states);
  const auto window = static_cast<std::size_t>(1 + options.gathered_ahead);
  const std::int64_t gathered =
      options.keeps_after_forward ? all : outer + most_gathered(units, window, options.part_ranks);
  plan.gathered_peak = gathered * options.gathered_bytes_per_element;
  std::int64_t largest = outer;
  for (const std::int64_t unit : units) largest = std::max(largest, unit);
  // The gradients as backward makes them, the same in the order of ranks, and this rank's part.
  plan.staging_peak =
      largest * (options.gathered_bytes_per_element + options.reduced_bytes_per_element) +
      divided(largest, options.ranks) * options.reduced_bytes_per_element;
  return plan;
}

}  // namespace muster::parallel
