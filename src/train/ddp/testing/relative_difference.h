// SPDX-License-Identifier: BSD-3-Clause
/// For tests: how far tensors are apart.
#pragma once

#include <torch/types.h>

namespace muster::testing {

/// The norm of the difference, by that of `b`.
inline double relative_difference(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).norm() / b.norm()).item<double>();
}

}  // namespace muster::testing
