// SPDX-License-Identifier: BSD-3-Clause
/// Tensors of a class of Python's whose elements are not those of this process's memory, such as a
/// DTensor: its shape is of a whole that lies on several ranks, and what a call would read of it
/// is a part.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace muster::group {

/// Says what a tensor of such a class is and what to give in its place; empty for any other tensor.
/// Called for tensors with a dispatcher of Python's only, on any thread, without locks.
using ForeignClass = std::string (*)(const at::Tensor& tensor);

/// The Python extension sets it once, before any call.
void set_foreign_class(ForeignClass describe);

/// Empty where calls may use the tensor.
std::string foreign_class_of(const at::Tensor& tensor);

}  // namespace muster::group
