#include "muster/group/collectives.h"

#include "bindings.h"
#include "blocking.h"

namespace muster::python {
namespace {

namespace py = pybind11;
using at::Tensor;
using Rank = std::optional<int>;
using List = std::optional<TensorList>;
using Splits = std::optional<std::vector<std::int64_t>>;

py::arg_v no_group() { return py::arg("group") = py::none(); }
py::arg_v synchronous() { return py::arg("async_op") = false; }
py::arg_v sum() { return py::arg("op") = ReduceOp(ReduceOp::SUM); }

void bind_rooted(py::module_& module) {
  module.def(
      "broadcast",
      [](const Tensor& tensor, Rank src, const Group& group, bool async_op, Rank group_src) {
        return blocking(group,
                        [&] { return broadcast(tensor, {.src = src, .group = group, .async_op = async_op, .group_src = group_src}); });
      },
      py::arg("tensor"), py::arg("src") = py::none(), no_group(), synchronous(), py::arg("group_src") = py::none());
  module.def(
      "reduce",
      [](const Tensor& tensor, Rank dst, ReduceOp op, const Group& group, bool async_op, Rank group_dst) {
        return blocking(
            group, [&] { return reduce(tensor, {.dst = dst, .op = op, .group = group, .async_op = async_op, .group_dst = group_dst}); });
      },
      py::arg("tensor"), py::arg("dst") = py::none(), sum(), no_group(), synchronous(), py::arg("group_dst") = py::none());
  module.def(
      "gather",
      [](const Tensor& tensor, List gather_list, Rank dst, const Group& group, bool async_op, Rank group_dst) {
        const GatherOptions options{.gather_list = std::move(gather_list).value_or(TensorList{}),
                                    .dst = dst,
                                    .group = group,
                                    .async_op = async_op,
                                    .group_dst = group_dst};
        return blocking(group, [&] { return gather(tensor, options); });
      },
      py::arg("tensor"), py::arg("gather_list") = py::none(), py::arg("dst") = py::none(), no_group(), synchronous(),
      py::arg("group_dst") = py::none());
  module.def(
      "scatter",
      [](const Tensor& tensor, List scatter_list, Rank src, const Group& group, bool async_op, Rank group_src) {
        const ScatterOptions options{.scatter_list = std::move(scatter_list).value_or(TensorList{}),
                                     .src = src,
                                     .group = group,
                                     .async_op = async_op,
                                     .group_src = group_src};
        return blocking(group, [&] { return scatter(tensor, options); });
      },
      py::arg("tensor"), py::arg("scatter_list") = py::none(), py::arg("src") = py::none(), no_group(), synchronous(),
      py::arg("group_src") = py::none());
}

void bind_reductions(py::module_& module) {
  module.def(
      "all_reduce",
      [](const Tensor& tensor, ReduceOp op, const Group& group, bool async_op) {
        return blocking(group, [&] { return all_reduce(tensor, {.op = op, .group = group, .async_op = async_op}); });
      },
      py::arg("tensor"), sum(), no_group(), synchronous());
  module.def(
      "all_reduce_coalesced",
      [](const TensorList& tensors, ReduceOp op, const Group& group, bool async_op) {
        return blocking(group, [&] { return all_reduce_coalesced(tensors, {.op = op, .group = group, .async_op = async_op}); });
      },
      py::arg("tensors"), sum(), no_group(), synchronous());
  module.def(
      "reduce_scatter",
      [](const Tensor& output, const TensorList& input_list, ReduceOp op, const Group& group, bool async_op) {
        return blocking(group, [&] { return reduce_scatter(output, input_list, {.op = op, .group = group, .async_op = async_op}); });
      },
      py::arg("output"), py::arg("input_list"), sum(), no_group(), synchronous());
  module.def(
      "reduce_scatter_tensor",
      [](const Tensor& output, const Tensor& input, ReduceOp op, const Group& group, bool async_op) {
        return blocking(group, [&] { return reduce_scatter_tensor(output, input, {.op = op, .group = group, .async_op = async_op}); });
      },
      py::arg("output"), py::arg("input"), sum(), no_group(), synchronous());
  module.def(
      "reduce_scatter_coalesced",
      [](const TensorList& output_tensors, const std::vector<TensorList>& input_tensor_lists, ReduceOp op, const Group& group,
         bool async_op) {
        return blocking(group, [&] {
          return reduce_scatter_coalesced(output_tensors, input_tensor_lists, {.op = op, .group = group, .async_op = async_op});
        });
      },
      py::arg("output_tensors"), py::arg("input_tensor_lists"), sum(), no_group(), synchronous());
}

void bind_exchanges(py::module_& module) {
  module.def(
      "all_gather",
      [](const TensorList& tensor_list, const Tensor& tensor, const Group& group, bool async_op) {
        return blocking(group, [&] { return all_gather(tensor_list, tensor, {.group = group, .async_op = async_op}); });
      },
      py::arg("tensor_list"), py::arg("tensor"), no_group(), synchronous());
  module.def(
      "all_gather_into_tensor",
      [](const Tensor& output_tensor, const Tensor& input_tensor, const Group& group, bool async_op) {
        return blocking(group, [&] { return all_gather_into_tensor(output_tensor, input_tensor, {.group = group, .async_op = async_op}); });
      },
      py::arg("output_tensor"), py::arg("input_tensor"), no_group(), synchronous());
  module.def(
      "all_gather_coalesced",
      [](const std::vector<TensorList>& output_tensor_lists, const TensorList& input_tensor_list, const Group& group, bool async_op) {
        return blocking(
            group, [&] { return all_gather_coalesced(output_tensor_lists, input_tensor_list, {.group = group, .async_op = async_op}); });
      },
      py::arg("output_tensor_lists"), py::arg("input_tensor_list"), no_group(), synchronous());
  module.def(
      "all_to_all_single",
      [](const Tensor& output, const Tensor& input, Splits output_split_sizes, Splits input_split_sizes, const Group& group,
         bool async_op) {
        const AllToAllSingleOptions options{.output_split_sizes = std::move(output_split_sizes).value_or(std::vector<std::int64_t>{}),
                                            .input_split_sizes = std::move(input_split_sizes).value_or(std::vector<std::int64_t>{}),
                                            .group = group,
                                            .async_op = async_op};
        return blocking(group, [&] { return all_to_all_single(output, input, options); });
      },
      py::arg("output"), py::arg("input"), py::arg("output_split_sizes") = py::none(), py::arg("input_split_sizes") = py::none(),
      no_group(), synchronous());
  module.def(
      "all_to_all",
      [](const TensorList& output_tensor_list, const TensorList& input_tensor_list, const Group& group, bool async_op) {
        return blocking(group, [&] { return all_to_all(output_tensor_list, input_tensor_list, {.group = group, .async_op = async_op}); });
      },
      py::arg("output_tensor_list"), py::arg("input_tensor_list"), no_group(), synchronous());
  module.def(
      "barrier",
      [](const Group& group, bool async_op, std::optional<std::vector<int>> device_ids) {
        const BarrierOptions options{
            .group = group, .async_op = async_op, .device_ids = std::move(device_ids).value_or(std::vector<int>{})};
        return blocking(group, [&] { return barrier(options); });
      },
      no_group(), synchronous(), py::arg("device_ids") = py::none());
}

}  // namespace

void bind_collectives(py::module_& module) {
  bind_rooted(module);
  bind_reductions(module);
  bind_exchanges(module);
}

}  // namespace muster::python
