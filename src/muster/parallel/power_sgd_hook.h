/// PowerSGD: a communication hook that sends two thin factors of each gradient matrix instead of
/// the matrix.
///
/// Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
/// Optimization", NeurIPS 2019; names and defaults are those of
/// torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "muster/group/process_group.h"
#include "muster/parallel/comm_hook.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace muster {

struct PowerSGDOptions {
  Group process_group = nullptr;  ///< null: the model's own
  int matrix_approximation_rank =
      1;  ///< columns of the factors: more is nearer to the gradient, and more to send
  std::int64_t start_powerSGD_iter = 1000;  ///< backward passes that average everything first
  double min_compression_rate =
      2;  ///< a matrix is sent whole unless its factors are smaller by more than this
  bool use_error_feedback = true;  ///< what was lost is added to the next gradient
  bool warm_start = true;          ///< start from the last factors, not from random ones
  double orthogonalization_epsilon =
      0;  ///< added to the length of a single column before it is divided by it
  std::uint64_t random_seed = 0;  ///< the same on all ranks
  std::int64_t compression_stats_logging_frequency =
      10'000;  ///< backward passes between two lines in the log (info)
  bool batch_tensors_with_same_shape = false;  ///< multiply matrices of one shape as one batch
};

/// The settings, and what the hook remembers from pass to pass: a copy of the gradients for error
/// feedback, and the factors. For one model, in whose backward passes alone it is used.
class PowerSGDState {
 public:
  /// Throws DistError for a rank or a rate that is not positive, and for start_powerSGD_iter below
  /// 2 with error feedback or warm start: the buckets change after the first pass.
  explicit PowerSGDState(const PowerSGDOptions& options = {});

  const PowerSGDOptions& options() const { return options_; }
  /// Backward passes so far.
  std::int64_t iteration() const { return iteration_; }
  /// Elements that passes with compression had, and that travelled for them.
  struct Stats {
    std::int64_t before = 0;
    std::int64_t after = 0;
    double rate() const {
      return after > 0 ? static_cast<double>(before) / static_cast<double>(after) : 0;
    }
  };
  Stats compression_stats() const { return stats_; }

  /// What is remembered, for a checkpoint: each rank saves and loads its own, for errors differ
  /// between ranks. Options are not part of it. The first pass after `load` averages everything: a
  /// model that was made anew lays its buckets out after it.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  friend CommHook powerSGD_hook(std::shared_ptr<PowerSGDState> state);
  friend CommHook batched_powerSGD_hook(std::shared_ptr<PowerSGDState> state);
  using Finish = std::function<at::Tensor()>;

  /// Matrices of one shape.
  struct Block {
    std::vector<at::Tensor>
        places;           // where they lie in the bucket, or the bucket itself with `batched`
    at::Tensor matrices;  // count x rows x columns
    at::Tensor p, q;      // count x rows x rank, count x columns x rank
  };
  struct Memory {
    at::Tensor error;
    at::Tensor q;  // all factors of the bucket
  };
  struct Pass;

  Finish start(const GradBucket& bucket, bool batched);
  Finish average(const GradBucket& bucket) const;
  std::vector<Block> plan(const GradBucket& bucket, bool batched, std::vector<at::Tensor>& whole);
  std::vector<Block> blocks_of(const std::vector<at::Tensor>& matrices) const;
  bool pays(std::int64_t rows, std::int64_t columns) const;
  at::Tensor factors(std::vector<Block>& blocks, Memory& memory, const at::TensorOptions& options);
  void orthogonalize(at::Tensor matrices) const;
  at::Tensor finish(Pass& pass);
  void count(const GradBucket& bucket);

  PowerSGDOptions options_;
  at::Generator random_;
  std::map<std::size_t, Memory> memory_;  // by bucket
  std::int64_t iteration_ = 0;
  std::int64_t next_report_ = 0;
  bool just_loaded_ = false;
  Stats stats_;
};

/// Each gradient of two or more dimensions as a matrix of its first dimension by the rest; sparse
/// ones travel whole. All ranks get the same bits.
///
///   auto state = std::make_shared<PowerSGDState>(PowerSGDOptions{.matrix_approximation_rank = 2,
///       .start_powerSGD_iter = 100});
///   model.register_comm_hook(powerSGD_hook(state));
CommHook powerSGD_hook(std::shared_ptr<PowerSGDState> state);
/// Each bucket as one square matrix: quicker, and further from the gradients.
CommHook batched_powerSGD_hook(std::shared_ptr<PowerSGDState> state);

}  // namespace muster
