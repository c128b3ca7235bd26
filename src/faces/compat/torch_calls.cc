// SPDX-License-Identifier: BSD-3-Clause
#include "faces/compat/torch_calls.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <algorithm>

namespace muster::compat {
namespace {

at::Tensor reduced(const at::Tensor& a, const at::Tensor& b, ReduceOp::Kind kind) {
  switch (kind) {
    case ReduceOp::PRODUCT: return a * b;
    case ReduceOp::MIN: return at::minimum(a, b);
    case ReduceOp::MAX: return at::maximum(a, b);
    case ReduceOp::BAND: return at::bitwise_and(a, b);
    case ReduceOp::BOR: return at::bitwise_or(a, b);
    case ReduceOp::BXOR: return at::bitwise_xor(a, b);
    default: return a + b;
  }
}

}  // namespace

void reduce_locally(const std::vector<at::Tensor>& tensors, const ReduceOp& op) {
  const at::NoGradGuard no_grad;
  at::Tensor all = tensors.front();
  for (std::size_t i = 1; i < tensors.size(); ++i) all = reduced(all, tensors[i], op.kind());
  const at::AutoDispatchBelowADInplaceOrView uncounted;
  for (const at::Tensor& tensor : tensors) tensor.copy_(all);
}

void copy_to_all(const std::vector<at::Tensor>& tensors, std::size_t index) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView uncounted;
  const at::Tensor& source = tensors.at(index);
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_same(source)) tensor.copy_(source);
  }
}

std::vector<at::Tensor> with_memory_of_their_own(std::vector<at::Tensor> tensors) {
  const at::NoGradGuard no_grad;
  for (auto tensor = tensors.begin(); tensor != tensors.end(); ++tensor) {
    const auto is_the_same = [&](const at::Tensor& other) {
      return tensor->layout() == at::kStrided && tensor->const_data_ptr() == other.const_data_ptr();
    };
    if (std::any_of(tensors.begin(), tensor, is_the_same)) *tensor = tensor->clone();
  }
  return tensors;
}

}  // namespace muster::compat
