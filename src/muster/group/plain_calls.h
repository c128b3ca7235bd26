/// The short way of the calls that most are: synchronous, on contiguous tensors of the CPU.
///
/// Each function looks whether its call is of that kind and right in every way. If so, it carries
/// the call out by `ProcessGroup::run_plain` and returns true. Else it has done nothing and returns
/// false: the long way, by a Request, does what is unusual and says what is wrong. Not for use by
/// anything but `collectives.cc` and `point_to_point.cc`.
#pragma once

#include "muster/group/collectives.h"
#include "muster/group/point_to_point.h"

namespace muster::group::plain {

bool broadcast(const at::Tensor& tensor, const BroadcastOptions& options);
bool all_reduce(const at::Tensor& tensor, const AllReduceOptions& options);
bool reduce(const at::Tensor& tensor, const ReduceOptions& options);
bool all_gather(const TensorList& tensor_list, const at::Tensor& tensor,
                const CollectiveOptions& options);
bool all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input,
                            const CollectiveOptions& options);
bool gather(const at::Tensor& tensor, const GatherOptions& options);
bool scatter(const at::Tensor& tensor, const ScatterOptions& options);
bool reduce_scatter(const at::Tensor& output, const TensorList& input_list,
                    const ReduceScatterOptions& options);
bool reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                           const ReduceScatterOptions& options);
bool all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                       const AllToAllSingleOptions& options);
bool all_to_all(const TensorList& output_tensor_list, const TensorList& input_tensor_list,
                const CollectiveOptions& options);
bool barrier(const BarrierOptions& options);
bool send(const at::Tensor& tensor, const SendOptions& options);
/// The sender's rank of the default group; none where nothing was done. Only from a rank that is
/// named.
std::optional<int> recv(const at::Tensor& tensor, const RecvOptions& options);

}  // namespace muster::group::plain
