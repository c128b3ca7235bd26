// SPDX-License-Identifier: BSD-3-Clause
/// Tensor and sequence parallelism: layers whose weights are divided over the ranks of a group.
///
/// The layers compute what torch::nn::Linear, Embedding, LayerNorm and cross_entropy compute in one
/// process, and their gradients are parts of that process's gradients. Sources: Shoeybi et al.,
/// "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
/// Models", 2022. Names are Megatron's.
///
/// Division. A dimension of `size` elements is divided as torch.chunk and DTensor do it: every rank
/// has ceil(size / ranks) of them, the last ones fewer or none. A sequence must divide evenly.
///
/// Initial weights. Each rank draws the whole weight as torch::nn does, from torch's CPU generator,
/// and keeps its part. Seed all ranks of the group alike: the whole then has the values that one
/// process would have, and biases and norms are equal on all ranks. Ranks that are threads share
/// that generator; let them construct one at a time, each after manual_seed.
///
/// Groups. Null is the default group, looked up at construction or, by functions, at the call.
/// Every rank of the group makes the same calls in the same order, in forward and in backward, and
/// its inputs require gradients where the others' do. Errors are DistError; a rank that throws for
/// its own arguments leaves the others waiting as in any collective. Modules are not thread-safe.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/enum.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <variant>
#include <vector>

#include "muster/device_mesh.h"  // set_tensor_parallel_part() of a layer of your own
#include "muster/process_group.h"

namespace muster {

// Functions between the two kinds of regions of a model: outside, all ranks have equal tensors;
// inside the tensor-parallel region each has a part. Differentiable any number of times. DistError
// on a rank that is not a member, for a dimension that the tensor does not have, for a part of
// another length than the division gives this rank, and for a sequence that does not divide evenly.

/// Returns the tensor. Backward sums the gradients over the group.
at::Tensor copy_to_tensor_parallel_region(const at::Tensor& tensor, const Group& group = nullptr);
/// Returns the sum over the group. Backward returns the gradient.
at::Tensor reduce_from_tensor_parallel_region(const at::Tensor& tensor,
                                              const Group& group = nullptr);
/// Returns this rank's part of dimension `dim`. Backward gathers the parts of the gradient.
at::Tensor scatter_to_tensor_parallel_region(const at::Tensor& tensor, const Group& group = nullptr,
                                             std::int64_t dim = -1);
/// Concatenates the ranks' parts of dimension `dim`, which has `size` elements; by default all
/// parts are as long as this rank's. Backward returns this rank's part of the gradient.
at::Tensor gather_from_tensor_parallel_region(const at::Tensor& tensor,
                                              const Group& group = nullptr, std::int64_t dim = -1,
                                              std::optional<std::int64_t> size = {});

// The same for sequences, divided along `dim` outside of the tensor-parallel region. The length
// must be a multiple of the group's size.

/// Returns this rank's part of the sequence. Backward gathers the parts of the gradient.
at::Tensor scatter_to_sequence_parallel_region(const at::Tensor& tensor,
                                               const Group& group = nullptr, std::int64_t dim = 0);
/// all_gather: concatenates the ranks' parts. Backward sums the gradients and returns this rank's
/// part (reduce_scatter). That is right where each rank goes on with a part of the computation;
/// `tensor_parallel_output_grad` false is for ranks that all go on with the whole: backward then
/// returns this rank's part without the sum.
at::Tensor gather_from_sequence_parallel_region(const at::Tensor& tensor,
                                                const Group& group = nullptr, std::int64_t dim = 0,
                                                bool tensor_parallel_output_grad = true);
/// reduce_scatter: sums over the group and returns this rank's part. Backward gathers (all_gather).
at::Tensor reduce_scatter_to_sequence_parallel_region(const at::Tensor& tensor,
                                                      const Group& group = nullptr,
                                                      std::int64_t dim = 0);

struct ColumnParallelLinearOptions {
  bool bias = true;
  bool gather_output = false;  ///< true: every rank gets the whole output
  /// The input is this rank's part of the sequence along `sequence_dim`.
  bool sequence_parallel = false;
  std::int64_t sequence_dim = 0;
  Group group = nullptr;
  std::optional<at::ScalarType> dtype = {};  ///< of parameters; default: torch's default dtype
  std::optional<at::Device> device = {};     ///< of parameters; default: the CPU
};

/// y = x W^T + b with the rows of W and b, the output features, divided over the group.
/// Input: [..., in_features], equal on all ranks; with sequence_parallel a part. Output: [..., this
/// rank's out_features], or [..., out_features] with gather_output; the sequence is whole.
class ColumnParallelLinearImpl : public torch::nn::Cloneable<ColumnParallelLinearImpl> {
 public:
  /// Throws DistError if this process is not a member of the group.
  ColumnParallelLinearImpl(std::int64_t in_features, std::int64_t out_features,
                           const ColumnParallelLinearOptions& options = {});
  /// Draws new weights; so does clone(), before it copies.
  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  /// Throws DistError if the last dimension is not in_features.
  at::Tensor forward(const at::Tensor& input);

  at::Tensor weight;  ///< [this rank's out_features, in_features]
  at::Tensor bias;    ///< [this rank's out_features]; undefined without bias

 private:
  std::int64_t in_features_, out_features_;
  ColumnParallelLinearOptions options_;
};
TORCH_MODULE(ColumnParallelLinear);

struct RowParallelLinearOptions {
  bool bias = true;
  bool input_is_parallel = true;  ///< false: every rank passes the whole input
  /// The output is this rank's part of the sequence along `sequence_dim`.
  bool sequence_parallel = false;
  std::int64_t sequence_dim = 0;
  Group group = nullptr;
  std::optional<at::ScalarType> dtype = {};  ///< as in ColumnParallelLinearOptions
  std::optional<at::Device> device = {};
};

/// y = x W^T + b with the columns of W, the input features, divided over the group. Every rank has
/// b, which is added once, after the sum. Input: [..., this rank's in_features], as a
/// ColumnParallelLinear returns it, or [..., in_features] without input_is_parallel. Output: [...,
/// out_features], equal on all ranks; with sequence_parallel a part.
class RowParallelLinearImpl : public torch::nn::Cloneable<RowParallelLinearImpl> {
 public:
  /// Throws DistError if this process is not a member of the group.
  RowParallelLinearImpl(std::int64_t in_features, std::int64_t out_features,
                        const RowParallelLinearOptions& options = {});
  /// Draws new weights; so does clone(), before it copies.
  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  /// Throws DistError if the last dimension is wrong.
  at::Tensor forward(const at::Tensor& input);

  at::Tensor weight;  ///< [out_features, this rank's in_features]
  at::Tensor bias;    ///< [out_features]; undefined without bias

 private:
  std::int64_t in_features_, out_features_;
  RowParallelLinearOptions options_;
};
TORCH_MODULE(RowParallelLinear);

struct VocabParallelEmbeddingOptions {
  /// The row of this id is zero at first, and gets no gradient. Negative: counted from the end.
  std::optional<std::int64_t> padding_idx = {};
  /// The output is this rank's part of the sequence along `sequence_dim`.
  bool sequence_parallel = false;
  std::int64_t sequence_dim = 0;
  Group group = nullptr;
  std::optional<at::ScalarType> dtype = {};  ///< as in ColumnParallelLinearOptions
  std::optional<at::Device> device = {};
};

/// A table of embeddings with the rows, the vocabulary, divided over the group. Input: integer ids
/// of any shape, equal on all ranks. Output: [..., embedding_dim], equal on all ranks; with
/// sequence_parallel a part.
class VocabParallelEmbeddingImpl : public torch::nn::Cloneable<VocabParallelEmbeddingImpl> {
 public:
  /// Throws DistError if this process is not a member of the group or padding_idx is not in the
  /// vocabulary.
  VocabParallelEmbeddingImpl(std::int64_t num_embeddings, std::int64_t embedding_dim,
                             const VocabParallelEmbeddingOptions& options = {});
  /// Draws new weights; so does clone(), before it copies.
  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  /// Throws DistError for an id that is not in the vocabulary; on accelerators, torch's assertion
  /// on the device fails instead.
  at::Tensor forward(const at::Tensor& ids);

  at::Tensor weight;  ///< [this rank's num_embeddings, embedding_dim]

 private:
  std::int64_t num_embeddings_, embedding_dim_;
  VocabParallelEmbeddingOptions options_;
};
TORCH_MODULE(VocabParallelEmbedding);

struct SequenceParallelLayerNormOptions {
  double eps = 1e-5;
  bool elementwise_affine = true;
  bool bias = true;  ///< has no effect without elementwise_affine
  Group group = nullptr;
  std::optional<at::ScalarType> dtype = {};  ///< as in ColumnParallelLinearOptions
  std::optional<at::Device> device = {};
};

/// LayerNorm of this rank's part of a sequence. The parameters are equal on all ranks; backward
/// sums their gradients over the group. Input and output: [..., *normalized_shape]. If the ranks
/// have the whole sequence, use torch::nn::LayerNorm.
class SequenceParallelLayerNormImpl : public torch::nn::Cloneable<SequenceParallelLayerNormImpl> {
 public:
  /// Throws DistError if this process is not a member of the group.
  explicit SequenceParallelLayerNormImpl(std::vector<std::int64_t> normalized_shape,
                                         const SequenceParallelLayerNormOptions& options = {});
  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  /// Throws DistError if the last dimensions are not normalized_shape.
  at::Tensor forward(const at::Tensor& input);

  at::Tensor weight;  ///< [*normalized_shape]; undefined without elementwise_affine
  at::Tensor bias;    ///< as weight; undefined without bias

 private:
  std::vector<std::int64_t> normalized_shape_;
  SequenceParallelLayerNormOptions options_;
};
TORCH_MODULE(SequenceParallelLayerNorm);

struct ParallelCrossEntropyOptions {
  std::int64_t ignore_index = -100;  ///< targets of this value add nothing
  std::variant<torch::enumtype::kNone, torch::enumtype::kMean, torch::enumtype::kSum> reduction =
      torch::kMean;
  double label_smoothing = 0;
  Group group = nullptr;
};

/// cross_entropy of logits that are divided over the group along the vocabulary, their last
/// dimension, as ColumnParallelLinear(..., vocab_size) returns them. `logits`: [..., this rank's
/// part of vocab_size]; `target`: [...], integers, equal on all ranks. Returns the same on every
/// rank: a scalar, or [...] for the reduction kNone. The mean is over the targets that are not
/// ignored. Two all_reduces of one to three numbers a target. 16-bit logits are computed in
/// float32.
///
/// Throws DistError if the shapes do not match, and on all ranks for a target that is neither in
/// the vocabulary nor ignored; on accelerators, torch's assertion on the device fails instead.
at::Tensor parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                                  std::int64_t vocab_size,
                                  const ParallelCrossEntropyOptions& options = {});

}  // namespace muster
