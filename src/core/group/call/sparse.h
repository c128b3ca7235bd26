// SPDX-License-Identifier: BSD-3-Clause
/// all_reduce of sparse COO tensors. Private to `group/`.
#pragma once

#include "muster/collectives.h"
#include "muster/work.h"

namespace muster::group {

/// In place: every rank's tensor becomes the coalesced sum, added in rank order and bitwise
/// identical on all ranks. SUM only. Shapes, numbers of sparse dimensions and dtypes must be equal.
/// Takes three all_gathers: properties, indices, values. With `async_op`, everything is done on
/// return and the Work is complete. Null on a non-member.
WorkRef all_reduce_sparse(const at::Tensor& tensor, const AllReduceOptions& options);

}  // namespace muster::group
