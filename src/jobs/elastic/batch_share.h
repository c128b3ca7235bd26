// SPDX-License-Identifier: BSD-3-Clause
/// How the samples of one step are shared out among any number of ranks. A pure function.
#pragma once

#include <cstdint>
#include <vector>

#include "muster/elastic.h"

namespace muster::elastic {

/// As `share_of_batch`, for that rank of so many.
std::vector<SampleRange> share_of_batch_for(int rank, int world_size, std::int64_t global_batch,
                                            std::int64_t largest);

}  // namespace muster::elastic
