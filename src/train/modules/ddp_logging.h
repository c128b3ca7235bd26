// SPDX-License-Identifier: BSD-3-Clause
/// DistributedDataParallel's log messages, in the wording of torch's documentation: construction
/// options and timing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "muster/clock.h"

namespace muster::parallel {

/// The options a model was constructed with. Fields that name environment variables are read when
/// the block is written.
struct ConstructionFacts {
  std::string module_name = {};
  int rank = 0;
  int world_size = 1;
  std::string backend_name = {};
  bool broadcast_buffers = true;
  std::int64_t bucket_cap_bytes = 0;
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = false;
  std::optional<std::vector<int>> device_ids = {};
  std::optional<int> output_device = {};
  std::vector<at::Tensor> parameters = {};      ///< those that require gradients
  std::vector<std::int64_t> bucket_sizes = {};  ///< in bytes, in order
};

/// `[Rank 0]: DDP Initialized with:` and one line per field, in the documentation's order; unset
/// fields are `N/A`.
std::string construction_block(const ConstructionFacts& facts);
/// Logs the block at level info if TORCH_DISTRIBUTED_DEBUG is INFO or DETAIL.
void log_construction(const ConstructionFacts& facts);

/// The class name as in Python: without namespaces, and without the `Impl` suffix that a module
/// holder removes.
std::string module_name_of(const std::string& type_name);

/// Timestamps of one training iteration.
struct IterationTimes {
  TimePoint forward_start{};
  TimePoint
      backward_start{};    ///< forward returned; as in torch, computing the loss counts as backward
  TimePoint comm_start{};  ///< the first bucket was launched
  TimePoint backward_end{};  ///< the last gradient arrived
  TimePoint comm_end{};      ///< the last bucket was averaged
};

/// Averages over the sampled iterations: the first 10, then every `sample_rate`-th.
class RuntimeStatistics {
 public:
  static constexpr int kSampleRate = 100;

  void set_sample_rate(int iterations) { rate_ = iterations; }
  bool samples(std::int64_t iteration) const { return iteration <= 10 || iteration % rate_ == 0; }
  void add(const IterationTimes& times);
  /// `[Rank r / n] Training M unused_parameter_size=..` and the four averages in nanoseconds.
  std::string text(const std::string& module_name, int rank, int world_size,
                   std::int64_t unused_bytes) const;

 private:
  int rate_ = kSampleRate;
  std::int64_t samples_ = 0;
  Duration forward_{}, backward_{}, comm_{}, overlap_{};  // sums
};

}  // namespace muster::parallel
