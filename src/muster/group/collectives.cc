#include "muster/group/collectives.h"

#include "muster/group/plain_calls.h"
#include "muster/group/requests.h"
#include "muster/group/resolve.h"
#include "muster/group/sparse.h"

namespace muster {

using group::call;
namespace plain = group::plain;

WorkRef broadcast(const at::Tensor& tensor, const BroadcastOptions& options) {
  if (plain::broadcast(tensor, options)) return nullptr;
  return call(options.group, Op::broadcast, "broadcast", [&](const ProcessGroup& group) {
    return requests::broadcast(group, tensor, options);
  });
}

WorkRef all_reduce(const at::Tensor& tensor, const AllReduceOptions& options) {
  if (plain::all_reduce(tensor, options)) return nullptr;
  if (tensor.defined() && tensor.layout() == at::kSparse)
    return group::all_reduce_sparse(tensor, options);
  return call(options.group, Op::all_reduce, "all_reduce", [&](const ProcessGroup& group) {
    return requests::all_reduce(group, tensor, options);
  });
}

WorkRef reduce(const at::Tensor& tensor, const ReduceOptions& options) {
  if (plain::reduce(tensor, options)) return nullptr;
  return call(options.group, Op::reduce, "reduce",
              [&](const ProcessGroup& group) { return requests::reduce(group, tensor, options); });
}

WorkRef all_gather(const TensorList& tensor_list, const at::Tensor& tensor,
                   const CollectiveOptions& options) {
  if (plain::all_gather(tensor_list, tensor, options)) return nullptr;
  return call(options.group, Op::all_gather, "all_gather", [&](const ProcessGroup& group) {
    return requests::all_gather(group, tensor_list, tensor, options);
  });
}

WorkRef all_gather_into_tensor(const at::Tensor& output_tensor, const at::Tensor& input_tensor,
                               const CollectiveOptions& options) {
  if (plain::all_gather_into_tensor(output_tensor, input_tensor, options)) return nullptr;
  return call(
      options.group, Op::all_gather, "all_gather_into_tensor", [&](const ProcessGroup& group) {
        return requests::all_gather_into_tensor(group, output_tensor, input_tensor, options);
      });
}

WorkRef gather(const at::Tensor& tensor, const GatherOptions& options) {
  if (plain::gather(tensor, options)) return nullptr;
  return call(options.group, Op::gather, "gather",
              [&](const ProcessGroup& group) { return requests::gather(group, tensor, options); });
}

WorkRef scatter(const at::Tensor& tensor, const ScatterOptions& options) {
  if (plain::scatter(tensor, options)) return nullptr;
  return call(options.group, Op::scatter, "scatter",
              [&](const ProcessGroup& group) { return requests::scatter(group, tensor, options); });
}

WorkRef reduce_scatter(const at::Tensor& output, const TensorList& input_list,
                       const ReduceScatterOptions& options) {
  if (plain::reduce_scatter(output, input_list, options)) return nullptr;
  return call(options.group, Op::reduce_scatter, "reduce_scatter", [&](const ProcessGroup& group) {
    return requests::reduce_scatter(group, output, input_list, options);
  });
}

WorkRef reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                              const ReduceScatterOptions& options) {
  if (plain::reduce_scatter_tensor(output, input, options)) return nullptr;
  return call(options.group, Op::reduce_scatter, "reduce_scatter_tensor",
              [&](const ProcessGroup& group) {
                return requests::reduce_scatter_tensor(group, output, input, options);
              });
}

WorkRef all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                          const AllToAllSingleOptions& options) {
  if (plain::all_to_all_single(output, input, options)) return nullptr;
  return call(options.group, Op::all_to_all, "all_to_all_single", [&](const ProcessGroup& group) {
    return requests::all_to_all_single(group, output, input, options);
  });
}

WorkRef all_to_all(const TensorList& output_tensor_list, const TensorList& input_tensor_list,
                   const CollectiveOptions& options) {
  if (plain::all_to_all(output_tensor_list, input_tensor_list, options)) return nullptr;
  return call(options.group, Op::all_to_all, "all_to_all", [&](const ProcessGroup& group) {
    return requests::all_to_all(group, output_tensor_list, input_tensor_list, options);
  });
}

WorkRef barrier(const BarrierOptions& options) {
  if (plain::barrier(options)) return nullptr;
  return call(options.group, Op::barrier, "barrier",
              [&](const ProcessGroup& group) { return requests::barrier(group, options); });
}

WorkRef all_reduce_coalesced(const TensorList& tensors, const AllReduceOptions& options) {
  return call(options.group, Op::all_reduce, "all_reduce_coalesced",
              [&](const ProcessGroup& group) {
                return requests::all_reduce_coalesced(group, tensors, options);
              });
}

WorkRef all_gather_coalesced(const std::vector<TensorList>& output_tensor_lists,
                             const TensorList& input_tensor_list,
                             const CollectiveOptions& options) {
  return call(options.group, Op::all_gather, "all_gather_coalesced",
              [&](const ProcessGroup& group) {
                return requests::all_gather_coalesced(group, output_tensor_lists, input_tensor_list,
                                                      options);
              });
}

WorkRef reduce_scatter_coalesced(const TensorList& output_tensors,
                                 const std::vector<TensorList>& input_tensor_lists,
                                 const ReduceScatterOptions& options) {
  return call(options.group, Op::reduce_scatter, "reduce_scatter_coalesced",
              [&](const ProcessGroup& group) {
                return requests::reduce_scatter_coalesced(group, output_tensors, input_tensor_lists,
                                                          options);
              });
}

}  // namespace muster
