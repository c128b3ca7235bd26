/// Which gradients travel together: rank arithmetic's counterpart for parameters, with no I/O.
///
/// What lives in `parallel/`: training one model on several ranks. A `Reducer` averages gradients
/// while backward runs and knows parameters only; `DistributedDataParallel` wraps a module around
/// it. May include everything up to group/. Test it alone: `ctest -R '^parallel'`.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace muster::parallel {

struct ParameterFacts {
  std::int64_t bytes = 0;
  at::ScalarType dtype = at::kFloat;
  c10::Device device = at::kCPU;
  bool alone = false;  ///< gets a bucket of its own: sparse gradients
};

/// Indices of the parameters of one bucket, in the order in which they lie in it.
using BucketIndices = std::vector<std::size_t>;

/// Divides the parameters, taken in `order` (each index once), into buckets of one dtype and
/// device. A bucket is full once it holds at least its limit: `first_bytes` for the first bucket of
/// each dtype and device, `cap_bytes` for those after it; nothing is ever split. Buckets stand in
/// the order in which they were filled, those left over at the end in the order of their first
/// parameter.
std::vector<BucketIndices> plan_buckets(std::span<const ParameterFacts> parameters,
                                        std::span<const std::size_t> order,
                                        std::int64_t first_bytes, std::int64_t cap_bytes);

}  // namespace muster::parallel
