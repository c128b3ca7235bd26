/// The several tensors of one c10d call, which stand for several devices of one process. What
/// torch's Gloo does for them before and after it talks to other ranks is done here before: then
/// every tensor has a call of its own, and all get the same value.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "muster/op.h"

namespace muster::compat {

/// Writes every one with all of them reduced, in the order of the list. Autograd is not told, nor
/// by the next.
void reduce_locally(const std::vector<at::Tensor>& tensors, const ReduceOp& op);
/// Writes every one with the value of `tensors[index]`.
void copy_to_all(const std::vector<at::Tensor>& tensors, std::size_t index);
/// The same tensors, with a copy in the place of one that stands in the list already.
std::vector<at::Tensor> with_memory_of_their_own(std::vector<at::Tensor> tensors);

}  // namespace muster::compat
