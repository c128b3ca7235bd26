/// The collectives of `collectives.h` as Requests, one function for each with its arguments: for
/// calls that are made once and started often (`PreparedRequest`). `options.group` is of no meaning
/// here. Throws DistError where the tensors have no such form.
#pragma once

#include "muster/group/collectives.h"
#include "muster/group/request.h"

namespace muster::requests {

Request broadcast(const ProcessGroup& group, at::Tensor tensor, const BroadcastOptions& options);
Request all_reduce(const ProcessGroup& group, at::Tensor tensor, const AllReduceOptions& options);
Request reduce(const ProcessGroup& group, at::Tensor tensor, const ReduceOptions& options);
Request all_gather(const ProcessGroup& group, const TensorList& tensor_list,
                   const at::Tensor& tensor, const CollectiveOptions& options);
Request all_gather_into_tensor(const ProcessGroup& group, at::Tensor output_tensor,
                               const at::Tensor& input_tensor, const CollectiveOptions& options);
Request gather(const ProcessGroup& group, const at::Tensor& tensor, const GatherOptions& options);
Request scatter(const ProcessGroup& group, at::Tensor tensor, const ScatterOptions& options);
Request reduce_scatter(const ProcessGroup& group, at::Tensor output, const TensorList& input_list,
                       const ReduceScatterOptions& options);
Request reduce_scatter_tensor(const ProcessGroup& group, at::Tensor output, const at::Tensor& input,
                              const ReduceScatterOptions& options);
Request all_to_all_single(const ProcessGroup& group, at::Tensor output, const at::Tensor& input,
                          const AllToAllSingleOptions& options);
Request all_to_all(const ProcessGroup& group, const TensorList& output_tensor_list,
                   const TensorList& input_tensor_list, const CollectiveOptions& options);
Request barrier(const ProcessGroup& group, const BarrierOptions& options);
Request all_reduce_coalesced(const ProcessGroup& group, const TensorList& tensors,
                             const AllReduceOptions& options);
Request all_gather_coalesced(const ProcessGroup& group,
                             const std::vector<TensorList>& output_tensor_lists,
                             const TensorList& input_tensor_list, const CollectiveOptions& options);
Request reduce_scatter_coalesced(const ProcessGroup& group, const TensorList& output_tensors,
                                 const std::vector<TensorList>& input_tensor_lists,
                                 const ReduceScatterOptions& options);

}  // namespace muster::requests
