// SPDX-License-Identifier: BSD-3-Clause
/// Reductions of the stand-in, element by element, in the order of ranks.
#pragma once

#include <cstddef>
#include <vector>

#include "backends/nccl/library.h"

namespace muster::standin {

std::size_t bytes_of(nccl::Type type);
double number_at(const void* data, nccl::Type type);

/// `parts`: one input of `count` elements per rank. A factor other than null multiplies each of
/// them first: factors[r] is rank r's.
void reduce(const std::vector<const std::byte*>& parts, const std::vector<double>* factors,
            std::byte* out, std::size_t count, nccl::Type type, nccl::NcclReduction reduction);

}  // namespace muster::standin
