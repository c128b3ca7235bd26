// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/elastic/batch_share.h"

#include <string>

#include "core/collective/plan/plan.h"
#include "core/group/errors.h"

namespace muster::elastic {
namespace {

/// Piece `index` of `count` samples in `pieces` pieces; earlier ones get the remainder.
SampleRange piece(std::int64_t count, std::int64_t pieces, std::int64_t index) {
  const auto slice = collective::plan::slice_of(static_cast<std::size_t>(count),
                                                static_cast<int>(pieces), static_cast<int>(index));
  return {static_cast<std::int64_t>(slice.begin), static_cast<std::int64_t>(slice.count), 0};
}

}  // namespace

std::vector<SampleRange> share_of_batch_for(int rank, int world_size, std::int64_t global_batch,
                                            std::int64_t largest) {
  if (largest < 0)
    group::invalid("elastic::share_of_batch: largest is " + std::to_string(largest) +
                   "; it is a number of samples, or 0 for no limit");
  const std::int64_t fewest = global_batch / world_size;
  const std::int64_t most = fewest + (global_batch % world_size != 0 ? 1 : 0);
  const std::int64_t rounds = largest == 0 ? 1 : (most + largest - 1) / largest;
  if (fewest < rounds || fewest == 0)
    group::invalid("elastic::share_of_batch: a batch of " + std::to_string(global_batch) +
                   " samples for " + std::to_string(world_size) + " ranks" +
                   (largest > 0 ? ", at most " + std::to_string(largest) + " at once," : "") +
                   " leaves some rank without a sample in some round; take a larger batch");
  const SampleRange mine = piece(global_batch, world_size, rank);
  std::vector<SampleRange> ranges;
  for (std::int64_t round = 0; round < rounds; ++round) {
    SampleRange range = piece(mine.count, rounds, round);
    range.first += mine.first;
    range.weight =
        static_cast<double>(range.count) * world_size / static_cast<double>(global_batch);
    ranges.push_back(range);
  }
  return ranges;
}

std::vector<SampleRange> share_of_batch(std::int64_t global_batch, std::int64_t largest) {
  return share_of_batch_for(get_rank(), get_world_size(), global_batch, largest);
}

}  // namespace muster::elastic
