#include <torch/nn/modules/embedding.h>
#include <torch/types.h>

#include <ostream>
#include <string>

#include "core/group/errors.h"
#include "muster/tensor_parallel.h"
#include "train/tensor/division.h"

namespace muster {

using at::Tensor;

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
                                            torch::nn::Embedding(whole)->weight, 0, *options_.group,
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

}  // namespace muster
