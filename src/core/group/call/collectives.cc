// SPDX-License-Identifier: BSD-3-Clause
#include "muster/collectives.h"

#include <string>

#include "core/group/call/call_builder.h"
#include "core/group/call/given_tensors.h"
#include "core/group/call/quantized.h"
#include "core/group/call/sparse.h"
#include "core/group/calls.h"
#include "core/group/errors.h"
#include "core/group/resolve.h"

// For each operation: a function that builds its call, and the public function that submits it.
namespace muster {

using group::ActingGroup;

namespace {

template <class Options>
bool wants_compression(const Options& options) {
  if constexpr (requires { options.feedback; })
    return options.compression != Compression::none || options.feedback.has_value();
  else if constexpr (requires { options.compression; })
    return options.compression != Compression::none;
  else
    return false;
}

/// Builds the call on the selected group and submits it; `quantized` makes a call with compression.
template <class Options, class Build, class Quantized>
WorkRef make(const Options& options, std::string_view name, Build build, Quantized quantized) {
  const ActingGroup group(options.group, name);
  Call call = build(*group);
  if (wants_compression(options)) [[unlikely]]
    return quantized(call);
  return group->submit(call);
}
template <class Options, class Build>
WorkRef make(const Options& options, std::string_view name, Build build) {
  return make(options, name, build, group::refuse_compression);
}

/// The members' parts of `whole`; none if the call has a problem, which it will explain.
TensorList parts_if_valid(const Call& call, const at::Tensor& whole, const at::Tensor& part) {
  if (call.problem() != Problem::none) return {};
  return group::parts_of(whole.detach(), part.detach(), call.group().size());
}

}  // namespace

Call calls::broadcast(ProcessGroup& group, const at::Tensor& tensor,
                      const BroadcastOptions& options) {
  static constexpr FunctionName kName = "broadcast";
  Call call(group, Op::broadcast, kName, options.timeout, options.async_op);
  CallBuilder build(call);
  build.root("src", options.src, options.group_src);
  build.in_place(tensor);
  build.keeps_versions();
  build.check();
  return call;
}

WorkRef broadcast(const at::Tensor& tensor, const BroadcastOptions& options) {
  return make(
      options, "broadcast",
      [&](ProcessGroup& group) { return calls::broadcast(group, tensor, options); },
      [&](Call& call) { return group::broadcast_quantized(call, tensor, options); });
}

Call calls::all_reduce(ProcessGroup& group, const at::Tensor& tensor,
                       const AllReduceOptions& options) {
  static constexpr FunctionName kName = "all_reduce";
  Call call(group, Op::all_reduce, kName, options.timeout, options.async_op);
  CallBuilder build(call);
  build.in_place(tensor);
  build.reduces(options.op);
  build.keeps_versions();
  build.check();
  return call;
}

WorkRef all_reduce(const at::Tensor& tensor, const AllReduceOptions& options) {
  const ActingGroup group(options.group, "all_reduce");
  Call call = calls::all_reduce(*group, tensor, options);
  if (wants_compression(options)) [[unlikely]]
    return group::all_reduce_quantized(call, tensor, options);
  if (call.problem() == Problem::kind && tensor.defined() && tensor.layout() == at::kSparse)
    return group::all_reduce_sparse(tensor, options);
  return group->submit(call);
}

Call calls::reduce(ProcessGroup& group, const at::Tensor& tensor, const ReduceOptions& options) {
  static constexpr FunctionName kName = "reduce";
  Call call(group, Op::reduce, kName, options.timeout, options.async_op);
  CallBuilder build(call);
  build.root("dst", options.dst, options.group_dst);
  build.in_place(tensor);
  build.reduces(options.op);
  build.keeps_versions();
  build.check();
  return call;
}

WorkRef reduce(const at::Tensor& tensor, const ReduceOptions& options) {
  return make(options, "reduce",
              [&](ProcessGroup& group) { return calls::reduce(group, tensor, options); });
}

Call calls::all_gather(ProcessGroup& group, const TensorList& tensor_list, const at::Tensor& tensor,
                       const CollectiveOptions& options) {
  static constexpr FunctionName kName = "all_gather";
  Call call(group, Op::all_gather, kName, options.timeout, options.async_op);
  CallBuilder build(call);
  build.add_input(tensor);
  build.add_output(tensor_list);
  build.check();
  return call;
}

WorkRef all_gather(const TensorList& tensor_list, const at::Tensor& tensor,
                   const CollectiveOptions& options) {
  return make(
      options, "all_gather",
      [&](ProcessGroup& group) { return calls::all_gather(group, tensor_list, tensor, options); },
      [&](Call& call) { return group::all_gather_quantized(call, tensor_list, tensor, options); });
}

Call calls::all_gather_into_tensor(ProcessGroup& group, const at::Tensor& output_tensor,
                                   const at::Tensor& input_tensor,
                                   const CollectiveOptions& options) {
  static constexpr FunctionName kName = "all_gather_into_tensor";
  Call call(group, Op::all_gather, kName, options.timeout, options.async_op);
  CallBuilder build(call);
  build.add_output_parts(output_tensor, input_tensor);
  build.check();
  return call;
}

WorkRef all_gather_into_tensor(const at::Tensor& output_tensor, const at::Tensor& input_tensor,
                               const CollectiveOptions& options) {
  return make(
      options, "all_gather_into_tensor",
      [&](ProcessGroup& group) {
        return calls::all_gather_into_tensor(group, output_tensor, input_tensor, options);
      },
      [&](Call& call) {
        const auto parts = parts_if_valid(call, output_tensor, input_tensor);
        return group::all_gather_quantized(call, parts, input_tensor, options);
      });
}

Call calls::gather(ProcessGroup& group, const at::Tensor& tensor, const GatherOptions& options) {
  static constexpr FunctionName kName = "gather";
  Call call(group, Op::gather, kName, options.timeout, options.async_op);
  CallBuilder build(call);
  build.root("dst", options.dst, options.group_dst, 0);
  build.add_input(tensor);
  build.add_output(options.gather_list);
  build.check();
  return call;
}

WorkRef gather(const at::Tensor& tensor, const GatherOptions& options) {
  return make(options, "gather",
              [&](ProcessGroup& group) { return calls::gather(group, tensor, options); });
}

Call calls::scatter(ProcessGroup& group, const at::Tensor& tensor, const ScatterOptions& options) {
  static constexpr FunctionName kName = "scatter";
  Call call(group, Op::scatter, kName, options.timeout, options.async_op);
  CallBuilder build(call);
  build.root("src", options.src, options.group_src, 0);
  build.add_input(options.scatter_list);
  build.add_output(tensor);
  build.keeps_versions();
  build.check();
  return call;
}

WorkRef scatter(const at::Tensor& tensor, const ScatterOptions& options) {
  return make(options, "scatter",
              [&](ProcessGroup& group) { return calls::scatter(group, tensor, options); });
}

Call calls::reduce_scatter(ProcessGroup& group, const at::Tensor& output,
                           const TensorList& input_list, const ReduceScatterOptions& options) {
  static constexpr FunctionName kName = "reduce_scatter";
  Call call(group, Op::reduce_scatter, kName, options.timeout, options.async_op);
  CallBuilder build(call);
  build.add_input(input_list);
  build.add_output(output);
  build.reduces(options.op);
  build.check();
  return call;
}

WorkRef reduce_scatter(const at::Tensor& output, const TensorList& input_list,
                       const ReduceScatterOptions& options) {
  return make(
      options, "reduce_scatter",
      [&](ProcessGroup& group) {
        return calls::reduce_scatter(group, output, input_list, options);
      },
      [&](Call& call) {
        return group::reduce_scatter_quantized(call, output, input_list, options);
      });
}

Call calls::reduce_scatter_tensor(ProcessGroup& group, const at::Tensor& output,
                                  const at::Tensor& input, const ReduceScatterOptions& options) {
  static constexpr FunctionName kName = "reduce_scatter_tensor";
  Call call(group, Op::reduce_scatter, kName, options.timeout, options.async_op);
  CallBuilder build(call);
  build.add_input_parts(input, output);
  build.reduces(options.op);
  build.check();
  return call;
}

WorkRef reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                              const ReduceScatterOptions& options) {
  return make(
      options, "reduce_scatter_tensor",
      [&](ProcessGroup& group) {
        return calls::reduce_scatter_tensor(group, output, input, options);
      },
      [&](Call& call) {
        const auto parts = parts_if_valid(call, input, output);
        return group::reduce_scatter_quantized(call, output, parts, options);
      });
}

Call calls::all_to_all_single(ProcessGroup& group, const at::Tensor& output,
                              const at::Tensor& input, const AllToAllSingleOptions& options) {
  static constexpr FunctionName kName = "all_to_all_single";
  Call call(group, Op::all_to_all, kName, options.timeout, options.async_op);
  CallBuilder build(call);
  build.exchange_splits(output, input, options.output_split_sizes, options.input_split_sizes);
  build.keeps_versions();
  build.check();
  return call;
}

WorkRef all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                          const AllToAllSingleOptions& options) {
  return make(options, "all_to_all_single", [&](ProcessGroup& group) {
    return calls::all_to_all_single(group, output, input, options);
  });
}

Call calls::all_to_all(ProcessGroup& group, const TensorList& output_tensor_list,
                       const TensorList& input_tensor_list, const CollectiveOptions& options) {
  static constexpr FunctionName kName = "all_to_all";
  Call call(group, Op::all_to_all, kName, options.timeout, options.async_op);
  CallBuilder build(call);
  build.add_input(input_tensor_list);
  build.add_output(output_tensor_list);
  build.check();
  return call;
}

WorkRef all_to_all(const TensorList& output_tensor_list, const TensorList& input_tensor_list,
                   const CollectiveOptions& options) {
  return make(options, "all_to_all", [&](ProcessGroup& group) {
    return calls::all_to_all(group, output_tensor_list, input_tensor_list, options);
  });
}

Call calls::barrier(ProcessGroup& group, const BarrierOptions& options) {
  static constexpr FunctionName kName = "barrier";
  Call call(group, Op::barrier, kName, options.timeout, options.async_op);
  if (!options.device_ids.empty()) {
    const auto index = static_cast<at::DeviceIndex>(options.device_ids.front());
    for (const auto& [type, backend] : core_of(group).parts().backends)
      if (type != c10::DeviceType::CPU && dynamic_cast<SpanBackend*>(backend.get()) == nullptr)
        call.make_barrier_on(at::Device(type, index));
  }
  return call;
}

WorkRef barrier(const BarrierOptions& options) {
  return make(options, "barrier",
              [&](ProcessGroup& group) { return calls::barrier(group, options); });
}

Call calls::all_reduce_coalesced(ProcessGroup& group, const TensorList& tensors,
                                 const AllReduceOptions& options) {
  static constexpr FunctionName kName = "all_reduce_coalesced";
  Call call(group, Op::all_reduce, kName, options.timeout, options.async_op);
  CallBuilder build(call);
  build.in_place_coalesced(tensors);
  build.reduces(options.op);
  build.check();
  return call;
}

WorkRef all_reduce_coalesced(const TensorList& tensors, const AllReduceOptions& options) {
  return make(options, "all_reduce_coalesced", [&](ProcessGroup& group) {
    return calls::all_reduce_coalesced(group, tensors, options);
  });
}

Call calls::all_gather_coalesced(ProcessGroup& group,
                                 const std::vector<TensorList>& output_tensor_lists,
                                 const TensorList& input_tensor_list,
                                 const CollectiveOptions& options) {
  static constexpr FunctionName kName = "all_gather_coalesced";
  Call call(group, Op::all_gather, kName, options.timeout, options.async_op);
  CallBuilder build(call);
  build.add_output_coalesced(output_tensor_lists, input_tensor_list);
  build.check();
  return call;
}

WorkRef all_gather_coalesced(const std::vector<TensorList>& output_tensor_lists,
                             const TensorList& input_tensor_list,
                             const CollectiveOptions& options) {
  return make(options, "all_gather_coalesced", [&](ProcessGroup& group) {
    return calls::all_gather_coalesced(group, output_tensor_lists, input_tensor_list, options);
  });
}

Call calls::reduce_scatter_coalesced(ProcessGroup& group, const TensorList& output_tensors,
                                     const std::vector<TensorList>& input_tensor_lists,
                                     const ReduceScatterOptions& options) {
  static constexpr FunctionName kName = "reduce_scatter_coalesced";
  Call call(group, Op::reduce_scatter, kName, options.timeout, options.async_op);
  CallBuilder build(call);
  build.add_input_coalesced(output_tensors, input_tensor_lists);
  build.reduces(options.op);
  build.check();
  return call;
}

WorkRef reduce_scatter_coalesced(const TensorList& output_tensors,
                                 const std::vector<TensorList>& input_tensor_lists,
                                 const ReduceScatterOptions& options) {
  return make(options, "reduce_scatter_coalesced", [&](ProcessGroup& group) {
    return calls::reduce_scatter_coalesced(group, output_tensors, input_tensor_lists, options);
  });
}

// ---- prepared calls

namespace {

template <class Options, class Build>
PreparedCall prepare(const Options& options, std::string_view name, Build build) {
  if (wants_compression(options))
    group::invalid(std::string(name) +
                   ": a prepared call has no compression; make the call with that option instead");
  const ActingGroup group(options.group, name);
  return group->prepare(build(*group));
}

}  // namespace

PreparedCall prepare_broadcast(const at::Tensor& tensor, const BroadcastOptions& options) {
  return prepare(options, "prepare_broadcast",
                 [&](ProcessGroup& group) { return calls::broadcast(group, tensor, options); });
}

PreparedCall prepare_all_reduce(const at::Tensor& tensor, const AllReduceOptions& options) {
  return prepare(options, "prepare_all_reduce",
                 [&](ProcessGroup& group) { return calls::all_reduce(group, tensor, options); });
}

PreparedCall prepare_all_gather_into_tensor(const at::Tensor& output_tensor,
                                            const at::Tensor& input_tensor,
                                            const CollectiveOptions& options) {
  return prepare(options, "prepare_all_gather_into_tensor", [&](ProcessGroup& group) {
    return calls::all_gather_into_tensor(group, output_tensor, input_tensor, options);
  });
}

PreparedCall prepare_reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                                           const ReduceScatterOptions& options) {
  return prepare(options, "prepare_reduce_scatter_tensor", [&](ProcessGroup& group) {
    return calls::reduce_scatter_tensor(group, output, input, options);
  });
}

}  // namespace muster
