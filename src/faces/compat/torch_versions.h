// SPDX-License-Identifier: BSD-3-Clause
/// All in which the versions of torch that muster is built for differ, under one name.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace muster::compat {

/// OpType::ALLGATHER_INTO_TENSOR_COALESCED, under which torch 2.14 and newer list the operation.
/// torch 2.13 lists it as COALESCED.
template <typename Type>
constexpr Type all_gather_into_tensor_coalesced() {
  if constexpr (requires { Type::ALLGATHER_INTO_TENSOR_COALESCED; })
    return Type::ALLGATHER_INTO_TENSOR_COALESCED;
  else
    return Type::COALESCED;
}
inline constexpr c10d::OpType kAllGatherIntoTensorCoalesced =
    all_gather_into_tensor_coalesced<c10d::OpType>();

}  // namespace muster::compat
