// SPDX-License-Identifier: BSD-3-Clause
/// Builds the `Call` of each function of `collectives.h` and of messages. Used by those functions
/// and by calls prepared for repeated use (`GroupCore::prepare`). `options.group` is ignored.
/// Nothing is thrown; problems are recorded in the call. The call points to its arguments: tensors,
/// lists and options must outlive it until `prepare` or `submit` returns.
#pragma once

#include "core/group/call/call.h"
#include "core/group/group_core.h"
#include "muster/collectives.h"
#include "muster/point_to_point.h"

namespace muster::calls {

Call broadcast(ProcessGroup& group, const at::Tensor& tensor, const BroadcastOptions& options);
Call all_reduce(ProcessGroup& group, const at::Tensor& tensor, const AllReduceOptions& options);
Call reduce(ProcessGroup& group, const at::Tensor& tensor, const ReduceOptions& options);
Call all_gather(ProcessGroup& group, const TensorList& tensor_list, const at::Tensor& tensor,
                const CollectiveOptions& options);
Call all_gather_into_tensor(ProcessGroup& group, const at::Tensor& output_tensor,
                            const at::Tensor& input_tensor, const CollectiveOptions& options);
Call gather(ProcessGroup& group, const at::Tensor& tensor, const GatherOptions& options);
Call scatter(ProcessGroup& group, const at::Tensor& tensor, const ScatterOptions& options);
Call reduce_scatter(ProcessGroup& group, const at::Tensor& output, const TensorList& input_list,
                    const ReduceScatterOptions& options);
Call reduce_scatter_tensor(ProcessGroup& group, const at::Tensor& output, const at::Tensor& input,
                           const ReduceScatterOptions& options);
Call all_to_all_single(ProcessGroup& group, const at::Tensor& output, const at::Tensor& input,
                       const AllToAllSingleOptions& options);
Call all_to_all(ProcessGroup& group, const TensorList& output_tensor_list,
                const TensorList& input_tensor_list, const CollectiveOptions& options);
Call barrier(ProcessGroup& group, const BarrierOptions& options);
Call all_reduce_coalesced(ProcessGroup& group, const TensorList& tensors,
                          const AllReduceOptions& options);
Call all_gather_coalesced(ProcessGroup& group, const std::vector<TensorList>& output_tensor_lists,
                          const TensorList& input_tensor_list, const CollectiveOptions& options);
Call reduce_scatter_coalesced(ProcessGroup& group, const TensorList& output_tensors,
                              const std::vector<TensorList>& input_tensor_lists,
                              const ReduceScatterOptions& options);
/// `name` is the public function's name.
Call send(ProcessGroup& group, const at::Tensor& tensor, const SendOptions& options,
          const FunctionName& name, bool async_op);
Call recv(ProcessGroup& group, const at::Tensor& tensor, const RecvOptions& options,
          const FunctionName& name, bool async_op);

}  // namespace muster::calls
