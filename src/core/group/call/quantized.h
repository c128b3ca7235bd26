// SPDX-License-Identifier: BSD-3-Clause
/// Collectives whose values travel in a block format (core/collective/quantized/block_codec.h), as
/// compositions of a group's all_to_all, all_gather and broadcast of bytes, so they work on every
/// backend.
///
/// all_reduce deals the blocks out to the members. Each encodes every other member's part and sends
/// it there (all_to_all). A member sums its part in float32, its own values unrounded, and encodes
/// the sums once (all_gather). All decode the same bytes, so all have the same bits.
///
/// Members that call different things get an error that names both calls, and the group fails. The
/// engine compares the whole call in each step (`Args::part_of`). For backends that compare
/// nothing, every message of a first step begins with what its sender called.
///
/// Each function takes the ordinary call, built and not yet submitted, which has made the checks of
/// the function. Refusals are those of that call. If compression would save nothing (16-bit values
/// in bf16, a single member, or members that share memory), the ordinary call is made.
///
/// Over links the engine takes an all_reduce in pieces (`collective::PieceSums`), and encodes and
/// sums some while others travel. Elsewhere an asynchronous all_reduce queues both steps at once,
/// the second with a function that the engine runs in between (`CallRecord::prepare`). On backends
/// that cannot do that it has finished when it returns, as has every call on tensors of an
/// accelerator.
#pragma once

#include "core/group/call/call.h"
#include "muster/collectives.h"

namespace muster::group {

WorkRef broadcast_quantized(Call& plain, const at::Tensor& tensor, const BroadcastOptions& options);
WorkRef all_reduce_quantized(Call& plain, const at::Tensor& tensor,
                             const AllReduceOptions& options);
WorkRef all_gather_quantized(Call& plain, const TensorList& outputs, const at::Tensor& input,
                             const CollectiveOptions& options);
WorkRef reduce_scatter_quantized(Call& plain, const at::Tensor& output, const TensorList& inputs,
                                 const ReduceScatterOptions& options);
/// For functions that have no compression: refuses the call, or does nothing on a non-member.
WorkRef refuse_compression(Call& plain);

}  // namespace muster::group
