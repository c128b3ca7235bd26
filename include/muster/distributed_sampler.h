// SPDX-License-Identifier: BSD-3-Clause
/// Divides a data set's samples among ranks by the rules of torch.utils.data.DistributedSampler.
/// The same seed and epoch give the same samples as in torch, so a job may be continued in the
/// other language.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace muster {

struct DistributedSamplerOptions {
  std::optional<int> num_replicas = {};  ///< default: the default group's size
  std::optional<int> rank = {};          ///< default: this process's rank in the default group
  bool shuffle = true;
  std::uint64_t seed = 0;  ///< must be equal on all ranks
  /// All ranks get the same number of samples. True drops the tail; false repeats the first
  /// samples.
  bool drop_last = false;
};

/// Copyable. Not thread-safe.
class DistributedSampler {
 public:
  using Options = DistributedSamplerOptions;
  explicit DistributedSampler(std::int64_t dataset_size, const Options& options = {});

  /// Selects the epoch's order (with `shuffle`). Call it on every rank before each epoch.
  void set_epoch(std::uint64_t epoch) { epoch_ = epoch; }
  std::uint64_t epoch() const { return epoch_; }
  /// This rank's `size()` samples of the epoch: every num_replicas-th of the common order, starting
  /// at `rank`.
  std::vector<std::int64_t> indices() const;
  std::int64_t size() const { return num_samples_; }

 private:
  std::int64_t dataset_size_;
  std::int64_t num_samples_;
  int num_replicas_;
  int rank_;
  bool shuffle_;
  bool drop_last_;
  std::uint64_t seed_;
  std::uint64_t epoch_ = 0;
};

}  // namespace muster
