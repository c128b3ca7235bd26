/// Which samples of a data set a rank works on, by torch's rules
/// (torch.utils.data.DistributedSampler): the same seed and epoch give the same samples as there,
/// so that a job may change its language in the middle.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace muster {

struct DistributedSamplerOptions {
  std::optional<int> num_replicas = {};  ///< absent: the default group's size
  std::optional<int> rank = {};          ///< absent: this process's rank in it
  bool shuffle = true;
  std::uint64_t seed = 0;  ///< the same on all ranks
  bool drop_last = false;  ///< leave the tail out, so that all ranks have as many; else the first
                           ///< samples are repeated for that
};

/// A value; one thread at a time.
class DistributedSampler {
 public:
  using Options = DistributedSamplerOptions;
  explicit DistributedSampler(std::int64_t dataset_size, const Options& options = {});

  /// Another epoch, another order (with `shuffle`): call it on every rank before each epoch.
  void set_epoch(std::uint64_t epoch) { epoch_ = epoch; }
  std::uint64_t epoch() const { return epoch_; }
  /// This rank's samples of the epoch, `size()` of them: every num_replicas-th of the common order,
  /// from `rank` on.
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
