// SPDX-License-Identifier: BSD-3-Clause
#include "muster/distributed_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>

#include <numeric>

#include "core/group/errors.h"
#include "muster/init.h"

namespace muster {

DistributedSampler::DistributedSampler(std::int64_t dataset_size, const Options& options)
    : dataset_size_(dataset_size),
      num_replicas_(options.num_replicas ? *options.num_replicas : get_world_size()),
      rank_(options.rank ? *options.rank : get_rank()),
      shuffle_(options.shuffle),
      drop_last_(options.drop_last),
      seed_(options.seed) {
  if (dataset_size_ < 1)
    group::invalid("DistributedSampler: a data set of " + std::to_string(dataset_size_) +
                   " samples cannot be divided");
  if (num_replicas_ < 1 || rank_ < 0 || rank_ >= num_replicas_)
    group::invalid("DistributedSampler: rank " + std::to_string(rank_) + " is not in 0 to " +
                   std::to_string(num_replicas_ - 1) + ", the replicas' ranks");
  num_samples_ = drop_last_ ? dataset_size_ / num_replicas_
                            : (dataset_size_ + num_replicas_ - 1) / num_replicas_;
}

std::vector<std::int64_t> DistributedSampler::indices() const {
  std::vector<std::int64_t> order(static_cast<std::size_t>(dataset_size_));
  if (shuffle_) {
    const auto shuffled =
        at::randperm(dataset_size_, at::detail::createCPUGenerator(seed_ + epoch_), at::kLong);
    const auto* first = shuffled.const_data_ptr<std::int64_t>();
    order.assign(first, first + dataset_size_);
  } else {
    std::iota(order.begin(), order.end(), 0);
  }
  std::vector<std::int64_t> mine;
  mine.reserve(static_cast<std::size_t>(num_samples_));
  // Past the end, the order wraps around: the padding.
  for (std::int64_t i = 0; i < num_samples_; ++i)
    mine.push_back(order[static_cast<std::size_t>((rank_ + i * num_replicas_) % dataset_size_)]);
  return mine;
}

}  // namespace muster
