/// all_reduce of sparse COO tensors. Private to `group/`.
#pragma once

#include "muster/group/collectives.h"

namespace muster::group {

/// In place: every rank's tensor becomes the coalesced sum, added in the order of ranks, the same
/// bits everywhere. SUM only; shapes, sparse dimensions and dtypes must be equal. Three all_gathers
/// of the group: facts, indices, values. With `async_op` all of it is done before it returns, and
/// the Work is a finished one. Null for a non-member.
WorkRef all_reduce_sparse(const at::Tensor& tensor, const AllReduceOptions& options);

}  // namespace muster::group
