// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/core/Tensor.h>
#include <torch/nn/functional/linear.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <ostream>
#include <string>
#include <utility>

#include "core/group/errors.h"
#include "muster/tensor_parallel.h"
#include "train/tensor/division.h"

namespace muster {
namespace {

using at::Tensor;
using tensor_parallel::chunk_of;
using tensor_parallel::divided_parameter;

std::string text_of(const char* layer, std::int64_t in, std::int64_t out,
                    const ProcessGroup& group) {
  return std::string(layer) + "(in_features=" + std::to_string(in) +
         ", out_features=" + std::to_string(out) + ", ranks=" + std::to_string(group.size()) + ")";
}

/// The layer of a job of one process: undivided.
torch::nn::Linear whole_linear(std::int64_t in, std::int64_t out, bool bias) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
}

}  // namespace

ColumnParallelLinearImpl::ColumnParallelLinearImpl(std::int64_t in_features,
                                                   std::int64_t out_features,
                                                   const ColumnParallelLinearOptions& options)
    : in_features_(in_features), out_features_(out_features), options_(options) {
  options_.group = tensor_parallel::member_group(options.group, "ColumnParallelLinear");
  ColumnParallelLinearImpl::reset();
}

void ColumnParallelLinearImpl::reset() {
  const auto whole = whole_linear(in_features_, out_features_, options_.bias);
  const tensor_parallel::ParameterOptions as{options_.dtype, options_.device};
  weight = register_parameter("weight", divided_parameter(whole->weight, 0, options_.group, as));
  bias = options_.bias
             ? register_parameter("bias", divided_parameter(whole->bias, 0, options_.group, as))
             : register_parameter("bias", {}, false);
}

void ColumnParallelLinearImpl::pretty_print(std::ostream& stream) const {
  stream << text_of("muster::ColumnParallelLinear", in_features_, out_features_, *options_.group);
}

Tensor ColumnParallelLinearImpl::forward(const Tensor& input) {
  const Group& group = options_.group;
  tensor_parallel::check_last_dimension(
      input, in_features_, text_of("ColumnParallelLinear", in_features_, out_features_, *group));
  const Tensor all = options_.sequence_parallel
                         ? gather_from_sequence_parallel_region(input, group, options_.sequence_dim)
                         : copy_to_tensor_parallel_region(input, group);
  Tensor part = torch::nn::functional::linear(all, weight, bias);
  if (!options_.gather_output) return part;
  return gather_from_tensor_parallel_region(part, group, -1, out_features_);
}

RowParallelLinearImpl::RowParallelLinearImpl(std::int64_t in_features, std::int64_t out_features,
                                             const RowParallelLinearOptions& options)
    : in_features_(in_features), out_features_(out_features), options_(options) {
  options_.group = tensor_parallel::member_group(options.group, "RowParallelLinear");
  RowParallelLinearImpl::reset();
}

void RowParallelLinearImpl::reset() {
  const auto whole = whole_linear(in_features_, out_features_, options_.bias);
  const tensor_parallel::ParameterOptions as{options_.dtype, options_.device};
  weight = register_parameter("weight", divided_parameter(whole->weight, 1, options_.group, as));
  bias = options_.bias
             ? register_parameter("bias", tensor_parallel::whole_parameter(whole->bias, as))
             : register_parameter("bias", {}, false);
}

void RowParallelLinearImpl::pretty_print(std::ostream& stream) const {
  stream << text_of("muster::RowParallelLinear", in_features_, out_features_, *options_.group);
}

Tensor RowParallelLinearImpl::forward(const Tensor& input) {
  const Group& group = options_.group;
  const bool parallel = options_.input_is_parallel;
  tensor_parallel::check_last_dimension(
      input, parallel ? chunk_of(in_features_, *group).count : in_features_,
      text_of("RowParallelLinear", in_features_, out_features_, *group),
      parallel ? ", this rank's part; input_is_parallel = false takes whole inputs" : "");
  const Tensor part = parallel ? input : scatter_to_tensor_parallel_region(input, group);
  const Tensor product = torch::nn::functional::linear(part, weight);
  if (!options_.sequence_parallel) {
    const Tensor sum = reduce_from_tensor_parallel_region(product, group);
    return bias.defined() ? sum + bias : sum;
  }
  const Tensor sum =
      reduce_scatter_to_sequence_parallel_region(product, group, options_.sequence_dim);
  // Each rank's gradient of the bias is that of its part of the sequence.
  return bias.defined() ? sum + copy_to_tensor_parallel_region(bias, group) : sum;
}

VocabParallelEmbeddingImpl::VocabParallelEmbeddingImpl(std::int64_t num_embeddings,
                                                       std::int64_t embedding_dim,
                                                       const VocabParallelEmbeddingOptions& options)
    : num_embeddings_(num_embeddings), embedding_dim_(embedding_dim), options_(options) {
  options_.group = tensor_parallel::member_group(options.group, "VocabParallelEmbedding");
  if (auto& padding = options_.padding_idx) {
    if (*padding < -num_embeddings || *padding >= num_embeddings)
      group::invalid("VocabParallelEmbedding: padding_idx " + std::to_string(*padding) +
                     " is not in the vocabulary of " + std::to_string(num_embeddings));
    if (*padding < 0) *padding += num_embeddings;
  }
  VocabParallelEmbeddingImpl::reset();
}

void VocabParallelEmbeddingImpl::reset() {
  torch::nn::EmbeddingOptions whole(num_embeddings_, embedding_dim_);
  whole.padding_idx(options_.padding_idx);
  weight = register_parameter("weight", tensor_parallel::divided_parameter(
                                            torch::nn::Embedding(whole)->weight, 0, options_.group,
                                            {options_.dtype, options_.device}));
}

void VocabParallelEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "muster::VocabParallelEmbedding(num_embeddings=" << num_embeddings_
         << ", embedding_dim=" << embedding_dim_ << ", ranks=" << options_.group->size() << ")";
}

Tensor VocabParallelEmbeddingImpl::forward(const Tensor& ids) {
  const Group& group = options_.group;
  tensor_parallel::check_indices(ids, num_embeddings_, "VocabParallelEmbedding", "id");
  const auto mine = tensor_parallel::chunk_of(num_embeddings_, *group);
  Tensor rows;
  if (mine.count > 0) {
    const Tensor elsewhere = ids.lt(mine.first).logical_or(ids.ge(mine.first + mine.count));
    const std::int64_t padding = options_.padding_idx.value_or(-1) - mine.first;
    rows = at::embedding(weight, (ids - mine.first).masked_fill(elsewhere, 0),
                         padding >= 0 && padding < mine.count ? padding : -1);
    rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0);
  } else {
    auto sizes = ids.sizes().vec();
    sizes.push_back(embedding_dim_);
    rows = at::zeros(sizes, weight.options()) + weight.sum();  // a part of the graph all the same
  }
  return options_.sequence_parallel
             ? reduce_scatter_to_sequence_parallel_region(rows, group, options_.sequence_dim)
             : reduce_from_tensor_parallel_region(rows, group);
}

SequenceParallelLayerNormImpl::SequenceParallelLayerNormImpl(
    std::vector<std::int64_t> normalized_shape, const SequenceParallelLayerNormOptions& options)
    : normalized_shape_(std::move(normalized_shape)), options_(options) {
  options_.group = tensor_parallel::member_group(options.group, "SequenceParallelLayerNorm");
  SequenceParallelLayerNormImpl::reset();
}

void SequenceParallelLayerNormImpl::reset() {
  const bool affine = options_.elementwise_affine;
  const auto registered = [&](const char* name, bool present, auto make) {
    if (!present) return register_parameter(name, {}, false);
    return register_parameter(
        name, tensor_parallel::whole_parameter(make(at::IntArrayRef(normalized_shape_)),
                                               {options_.dtype, options_.device}));
  };
  weight = registered("weight", affine, [](auto sizes) { return at::ones(sizes); });
  bias = registered("bias", affine && options_.bias, [](auto sizes) { return at::zeros(sizes); });
}

void SequenceParallelLayerNormImpl::pretty_print(std::ostream& stream) const {
  stream << "muster::SequenceParallelLayerNorm(" << tensor_parallel::text_of(normalized_shape_)
         << ", eps=" << options_.eps << ", ranks=" << options_.group->size() << ")";
}

Tensor SequenceParallelLayerNormImpl::forward(const Tensor& input) {
  const at::IntArrayRef shape = normalized_shape_;
  if (input.sizes().size() < shape.size() ||
      input.sizes().slice(input.sizes().size() - shape.size()) != shape)
    group::invalid("SequenceParallelLayerNorm: the input is " +
                   tensor_parallel::text_of(input.sizes()) +
                   ", and its last dimensions should be " + tensor_parallel::text_of(shape));
  // Each rank's gradients of the parameters are those of its part of the sequence.
  const auto shared = [&](const Tensor& parameter) {
    return parameter.defined() ? copy_to_tensor_parallel_region(parameter, options_.group)
                               : parameter;
  };
  return at::layer_norm(input, shape, shared(weight), shared(bias), options_.eps);
}

}  // namespace muster
