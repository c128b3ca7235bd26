// SPDX-License-Identifier: BSD-3-Clause
/// Assigns gradients to buckets; pure, no I/O.
///
/// `parallel/` trains one model on several ranks. A `Reducer` averages gradients while backward
/// runs and knows only parameters; `DistributedDataParallel` wraps a module around it. It may
/// include everything up to group/. Its tests: `ctest -R '^parallel'`.
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
  bool alone = false;  ///< gets its own bucket: sparse gradients
};

/// Indices of the parameters of one bucket, in the order of their memory in it.
using BucketIndices = std::vector<std::size_t>;

/// Divides the parameters, taken in `order` (each index once), into buckets of one dtype and
/// device. A bucket is full once it holds at least its limit: `first_bytes` for the first bucket of
/// each dtype and device, `cap_bytes` for later ones. Parameters are never split. Full buckets come
/// first, in the order they were filled; partly filled ones follow, ordered by their first
/// parameter.
std::vector<BucketIndices> plan_buckets(std::span<const ParameterFacts> parameters,
                                        std::span<const std::size_t> order,
                                        std::int64_t first_bytes, std::int64_t cap_bytes);

}  // namespace muster::parallel
