/// What DistributedDataParallel writes to the log, in the words of torch's documents: what it was
/// made of, and where its time goes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "muster/base/clock.h"

namespace muster::parallel {

/// What one model was made of. The fields of the block that name environment variables are read
/// when it is written.
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
  std::vector<at::Tensor> parameters = {};      ///< those that are trained
  std::vector<std::int64_t> bucket_sizes = {};  ///< bytes, in order
};

/// `[Rank 0]: DDP Initialized with:` and a line for each field, in the documents' order; what is
/// unset is `N/A`.
std::string construction_block(const ConstructionFacts& facts);
/// Logs the block at level info where TORCH_DISTRIBUTED_DEBUG is INFO or DETAIL.
void log_construction(const ConstructionFacts& facts);

/// The class's own name, as Python would say it: no namespaces, and no `Impl` at the end where a
/// module holder has cut it off.
std::string module_name_of(const std::string& type_name);

/// Moments of one training iteration.
struct IterationTimes {
  TimePoint forward_start{};
  TimePoint backward_start{};  ///< forward has returned; as in torch, the loss counts as backward
  TimePoint comm_start{};      ///< the first bucket is on its way
  TimePoint backward_end{};    ///< the last gradient is there
  TimePoint comm_end{};        ///< the last bucket is averaged
};

/// Averages over the iterations that were sampled: the first ten, then each `sample_rate`th.
class RuntimeStatistics {
 public:
  static constexpr int kSampleRate = 100;

  void set_sample_rate(int iterations) { rate_ = iterations; }
  bool samples(std::int64_t iteration) const { return iteration <= 10 || iteration % rate_ == 0; }
  void add(const IterationTimes& times);
  /// `[Rank r / n] Training M unused_parameter_size=..` and the four averages, in nanoseconds.
  std::string text(const std::string& module_name, int rank, int world_size,
                   std::int64_t unused_bytes) const;

 private:
  int rate_ = kSampleRate;
  std::int64_t samples_ = 0;
  Duration forward_{}, backward_{}, comm_{}, overlap_{};  // sums
};

}  // namespace muster::parallel
