// SPDX-License-Identifier: BSD-3-Clause
/// Communication hooks: how a bucket of gradients is averaged between backward and the optimizer,
/// from one all_reduce to PowerSGD.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "muster/collectives.h"
#include "muster/process_group.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace muster {

/// One bucket. The tensors alias the reducer's memory and are valid until the hook's result has
/// been consumed.
struct GradBucket {
  std::size_t index = 0;  ///< buckets are communicated in this order, equal on all ranks
  bool is_last = false;   ///< last bucket of this backward pass
  /// All gradients of the bucket as a one-dimensional tensor: this rank's sums, not divided.
  /// Complex gradients are stored as pairs of reals.
  at::Tensor buffer = {};
  /// Views of `buffer`, shaped like their parameters; complex ones have a trailing dimension of
  /// size 2.
  std::vector<at::Tensor> gradients = {};
  std::vector<at::Tensor> parameters = {};
  /// The model's group. Hooks should communicate on it: a failure in backward aborts the calls on
  /// this group, while calls on another group wait for their timeout.
  Group group = nullptr;
};

/// Starts the communication of a bucket and immediately returns a function that finishes it. That
/// function blocks and returns the gradients for the optimizer: as many elements as `buffer`, of
/// any floating dtype (it may be `buffer` itself). The hook runs during backward, in bucket order,
/// on every rank; the finishing functions run in the same order at the end of backward. Exceptions
/// propagate out of backward.
using CommHook = std::function<std::function<at::Tensor()>(const GradBucket& bucket)>;

/// Averages over `group` (null: the bucket's own group, the usual choice). Equivalent to no hook,
/// except that the hook divides instead of the reducer.
CommHook all_reduce_hook(const Group& group = nullptr);
/// As all_reduce_hook, but divides first and sends float16 or bfloat16: half the bytes at lower
/// precision.
CommHook fp16_compress_hook(const Group& group = nullptr);
CommHook bf16_compress_hook(const Group& group = nullptr);
/// Averages with `compression` of `all_reduce`, whose errors it has, for gradients of float32,
/// float16 and bfloat16: an eighth of the bytes of float32 in int4, a fourth in int8.
CommHook quantized_hook(Compression compression, const Group& group = nullptr);

// PowerSGD: a hook that sends two low-rank factors of each gradient matrix instead of the matrix.
//
// Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
// Optimization", NeurIPS 2019; names and defaults are those of
// torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.

struct PowerSGDOptions {
  Group process_group = nullptr;  ///< null: the model's group
  /// Columns of the factors. A higher rank is more accurate and sends more.
  int matrix_approximation_rank = 1;
  /// Backward passes without compression at the start.
  std::int64_t start_powerSGD_iter = 1000;
  /// A matrix is compressed only if its factors are smaller by more than this ratio.
  double min_compression_rate = 2;
  /// Add the approximation error to the next gradient.
  bool use_error_feedback = true;
  /// Start from the previous factors instead of random ones.
  bool warm_start = true;
  /// Added to a column's norm before dividing by it.
  double orthogonalization_epsilon = 0;
  /// Must be equal on all ranks.
  std::uint64_t random_seed = 0;
  /// Backward passes between two log lines (level info).
  std::int64_t compression_stats_logging_frequency = 10'000;
  /// Multiply matrices of equal shape as one batch.
  bool batch_tensors_with_same_shape = false;
};

/// The options and the hook's state between passes: the error-feedback copy of the gradients, and
/// the factors. For one model, used only in its backward passes.
class PowerSGDState {
 public:
  /// Throws DistError if the rank or the rate is not positive, or if start_powerSGD_iter is below 2
  /// with error feedback or warm start: the buckets change after the first pass.
  explicit PowerSGDState(const PowerSGDOptions& options = {});

  const PowerSGDOptions& options() const { return options_; }
  /// Backward passes so far.
  std::int64_t iteration() const { return iteration_; }
  /// Elements before and after compression, over all compressed passes.
  struct Stats {
    std::int64_t before = 0;
    std::int64_t after = 0;
    double rate() const {
      return after > 0 ? static_cast<double>(before) / static_cast<double>(after) : 0;
    }
  };
  Stats compression_stats() const { return stats_; }

  /// Save and load the state for a checkpoint. Each rank saves and loads its own, because errors
  /// differ between ranks. Options are not included. The first pass after `load` is not compressed,
  /// because a newly constructed model lays out its final buckets only after that pass.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  friend CommHook powerSGD_hook(std::shared_ptr<PowerSGDState> state);
  friend CommHook batched_powerSGD_hook(std::shared_ptr<PowerSGDState> state);
  using Finish = std::function<at::Tensor()>;

  /// Matrices of one shape.
  struct Block {
    // Their locations in the bucket, or the bucket itself if `batched`.
    std::vector<at::Tensor> places;
    at::Tensor matrices;  // count x rows x columns
    at::Tensor p, q;      // count x rows x rank, count x columns x rank
  };
  struct Memory {
    at::Tensor error;
    at::Tensor q;  // all factors of the bucket
  };
  struct CompressionPass;

  Finish start(const GradBucket& bucket, bool batched);
  Finish average(const GradBucket& bucket) const;
  std::vector<Block> plan(const GradBucket& bucket, bool batched, std::vector<at::Tensor>& whole);
  std::vector<Block> blocks_of(const std::vector<at::Tensor>& matrices) const;
  bool pays(std::int64_t rows, std::int64_t columns) const;
  at::Tensor factors(std::vector<Block>& blocks, Memory& memory, const at::TensorOptions& options);
  void orthogonalize(at::Tensor matrices) const;
  at::Tensor finish(CompressionPass& pass);
  void count(const GradBucket& bucket);

  PowerSGDOptions options_;
  at::Generator random_;
  std::map<std::size_t, Memory> memory_;  // by bucket
  std::int64_t iteration_ = 0;
  std::int64_t next_report_ = 0;
  bool just_loaded_ = false;
  Stats stats_;
};

/// Treats each gradient of two or more dimensions as a matrix of its first dimension by the rest;
/// sparse gradients are sent whole. All ranks get bitwise identical results.
///
///   auto state = std::make_shared<PowerSGDState>(PowerSGDOptions{.matrix_approximation_rank = 2,
///       .start_powerSGD_iter = 100});
///   model.register_comm_hook(powerSGD_hook(state));
CommHook powerSGD_hook(std::shared_ptr<PowerSGDState> state);
/// Treats each bucket as one square matrix: faster, but less accurate.
CommHook batched_powerSGD_hook(std::shared_ptr<PowerSGDState> state);

namespace parallel {

/// The group for a hook constructed with `given`: `given`, otherwise the bucket's group, otherwise
/// (a bucket not made by a model) the default group.
Group group_of(const GradBucket& bucket, const Group& given);

}  // namespace parallel
}  // namespace muster
