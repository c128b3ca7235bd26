// SPDX-License-Identifier: BSD-3-Clause
#include <torch/types.h>

#include <limits>
#include <string>

#include "core/group/errors.h"
#include "muster/collectives.h"
#include "muster/tensor_parallel.h"
#include "train/tensor/division.h"

namespace muster {
namespace {

using at::Tensor;
using tensor_parallel::Chunk;

constexpr const char* kName = "parallel_cross_entropy";

void check_shapes(const Tensor& logits, const Tensor& target, std::int64_t vocab_size,
                  const Chunk& mine) {
  if (logits.dim() != target.dim() + 1 ||
      logits.sizes().slice(0, static_cast<std::size_t>(target.dim())) != target.sizes())
    group::invalid(std::string(kName) + ": logits are " + tensor_parallel::text_of(logits.sizes()) +
                   ", and targets " + tensor_parallel::text_of(target.sizes()) +
                   "; logits have one dimension more, the vocabulary");
  tensor_parallel::check_last_dimension(
      logits, mine.count, kName,
      ", this rank's part of the vocabulary of " + std::to_string(vocab_size));
}

/// Logits less the greatest one of all ranks, so that no exponential overflows.
Tensor shifted(const Tensor& logits, const Group& group) {
  const Tensor mine = logits.detach();
  Tensor greatest = mine.size(-1) > 0
                        ? mine.amax(-1)
                        : at::full(mine.sizes().slice(0, mine.sizes().size() - 1),
                                   -std::numeric_limits<double>::infinity(), mine.options());
  if (group->size() > 1) all_reduce(greatest, {.op = ReduceOp::MAX, .group = group});
  return logits - greatest.unsqueeze(-1);
}

/// The targets' logits where this rank has them, else zero.
Tensor picked(const Tensor& logits, const Tensor& target, const Chunk& mine) {
  if (mine.count == 0) return logits.sum(-1);
  const Tensor index = target.to(at::kLong) - mine.first;
  const Tensor elsewhere = index.lt(0).logical_or(index.ge(mine.count));
  return logits.gather(-1, index.masked_fill(elsewhere, 0).unsqueeze(-1))
      .squeeze(-1)
      .masked_fill(elsewhere, 0);
}

}  // namespace

Tensor parallel_cross_entropy(const Tensor& logits, const Tensor& target, std::int64_t vocab_size,
                              const ParallelCrossEntropyOptions& options) {
  const Group group = tensor_parallel::member_group(options.group, kName);
  const Chunk mine = tensor_parallel::chunk_of(vocab_size, *group);
  check_shapes(logits, target, vocab_size, mine);
  const Tensor ignored = target.eq(options.ignore_index);
  tensor_parallel::check_indices(target.masked_fill(ignored, 0), vocab_size, kName, "target");

  const bool narrow = logits.scalar_type() == at::kHalf || logits.scalar_type() == at::kBFloat16;
  const Tensor own = shifted(narrow ? logits.to(at::kFloat) : logits, group);
  std::vector<Tensor> parts{own.exp().sum(-1), picked(own, target, mine)};
  if (options.label_smoothing > 0) parts.push_back(own.sum(-1));
  const Tensor sums = reduce_from_tensor_parallel_region(at::stack(parts), group);

  const Tensor log_of_sum = sums[0].log();
  Tensor losses = log_of_sum - sums[1];
  if (options.label_smoothing > 0) {
    const Tensor uniform = log_of_sum - sums[2] / vocab_size;
    losses = losses * (1 - options.label_smoothing) + uniform * options.label_smoothing;
  }
  losses = losses.masked_fill(ignored, 0);
  if (std::holds_alternative<torch::enumtype::kSum>(options.reduction))
    losses = losses.sum();
  else if (std::holds_alternative<torch::enumtype::kMean>(options.reduction))
    losses = losses.sum() / ignored.logical_not().sum();
  return losses.to(logits.scalar_type());
}

}  // namespace muster
