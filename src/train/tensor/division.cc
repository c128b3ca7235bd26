// SPDX-License-Identifier: BSD-3-Clause
#include "train/tensor/division.h"

#include <torch/types.h>

#include <algorithm>

#include "core/group/errors.h"
#include "muster/init.h"
#include "muster/tensor_parallel.h"

namespace muster::tensor_parallel {

Group member_group(const Group& group, std::string_view who) {
  Group found = group ? group : default_group();
  if (!found->is_member())
    group::invalid(std::string(who) + ": this rank is not a member of the group");
  return found;
}

at::Tensor whole_parameter(const at::Tensor& whole, const ParameterOptions& options) {
  at::TensorOptions as = whole.options().requires_grad(false);
  if (options.dtype) as = as.dtype(*options.dtype);
  if (options.device) as = as.device(*options.device);
  return at::empty(whole.sizes(), as).copy_(whole.detach());
}

at::Tensor divided_parameter(const at::Tensor& whole, std::int64_t dim, const Group& group,
                             const ParameterOptions& options) {
  const Chunk mine = chunk_of(whole.size(dim), *group);
  at::Tensor part = whole_parameter(whole.detach().narrow(dim, mine.first, mine.count), options);
  std::vector<std::int64_t> offsets(static_cast<std::size_t>(whole.dim()), 0);
  offsets[static_cast<std::size_t>(dim)] = mine.first;
  set_tensor_parallel_part(
      part, {.sizes = whole.sizes().vec(), .offsets = std::move(offsets), .group = group});
  return part;
}

std::string text_of(at::IntArrayRef sizes) {
  std::string text = "[";
  for (const std::int64_t size : sizes)
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

void check_last_dimension(const at::Tensor& input, std::int64_t expected, const std::string& who,
                          std::string_view hint) {
  if (input.dim() > 0 && input.size(-1) == expected) return;
  group::invalid(who + ": the input is " + text_of(input.sizes()) +
                 ", and its last dimension should be " + std::to_string(expected) +
                 std::string(hint));
}

void check_indices(const at::Tensor& indices, std::int64_t size, std::string_view who,
                   std::string_view what) {
  if (indices.numel() == 0) return;
  const std::string rest = std::string(what) + " is not in the vocabulary of " +
                           std::to_string(size) + ", 0 to " + std::to_string(size - 1);
  if (!indices.is_cpu()) {
    at::_assert_async(indices.ge(0).logical_and(indices.lt(size)).all(),
                      std::string(who) + ": a " + rest);
    return;
  }
  const auto [low, high] = at::aminmax(indices);
  const auto least = low.item<std::int64_t>(), greatest = high.item<std::int64_t>();
  if (least >= 0 && greatest < size) return;
  group::invalid(std::string(who) + ": " + rest + ": " +
                 std::to_string(least < 0 ? least : greatest));
}

}  // namespace muster::tensor_parallel
