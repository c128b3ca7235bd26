// SPDX-License-Identifier: BSD-3-Clause
#include "muster/collectives.h"

#include <pybind11/chrono.h>

#include <optional>
#include <string>

#include "bindings.h"
#include "blocking.h"

namespace muster::python {
namespace {

namespace py = pybind11;
using at::Tensor;
using Rank = std::optional<int>;
using Timeout = std::optional<Duration>;
using List = std::optional<TensorList>;
using Name = std::optional<std::string>;
using Splits = std::optional<std::vector<std::int64_t>>;

py::arg_v no_group() { return py::arg("group") = py::none(); }
py::arg_v synchronous() { return py::arg("async_op") = false; }
py::arg_v own_timeout() { return py::arg("timeout") = py::none(); }
py::arg_v no_compression() { return py::arg("compression") = py::none(); }
py::arg_v sum() { return py::arg("op") = ReduceOp(ReduceOp::SUM); }

void bind_rooted(py::module_& module) {
  module.def(
      "broadcast",
      [](const Tensor& tensor, Rank src, const Group& group, bool async_op, Rank group_src,
         Timeout timeout, const Name& compression) {
        return blocking(group, [&] {
          return broadcast(tensor, {.src = src,
                                    .group = group,
                                    .async_op = async_op,
                                    .group_src = group_src,
                                    .timeout = timeout,
                                    .compression = compression_of(compression)});
        });
      },
      py::arg("tensor"), py::arg("src") = py::none(), no_group(), synchronous(),
      py::arg("group_src") = py::none(), py::kw_only(), own_timeout(), no_compression(),
      "src's tensor (any shape, any dtype) goes to all members; as many elements everywhere. src: "
      "a rank of the "
      "default group; group_src: of `group`. With async_op a Work; None without, and for a "
      "non-member. Raises "
      "DistBackendError, with the ranks at fault, where a rank fails, does not come within "
      "`timeout` (None: the group's), or "
      "makes another call.");
  module.def(
      "reduce",
      [](const Tensor& tensor, Rank dst, ReduceOp op, const Group& group, bool async_op,
         Rank group_dst, Timeout timeout) {
        return blocking(group, [&] {
          return reduce(tensor, {.dst = dst,
                                 .op = op,
                                 .group = group,
                                 .async_op = async_op,
                                 .group_dst = group_dst,
                                 .timeout = timeout});
        });
      },
      py::arg("tensor"), py::arg("dst") = py::none(), sum(), no_group(), synchronous(),
      py::arg("group_dst") = py::none(), py::kw_only(), own_timeout(),
      "The elements of all members' tensors combined by `op` into dst's tensor; elsewhere it is "
      "left as it was. Same "
      "shape and dtype everywhere. dst: a rank of the default group; group_dst: of `group`. With "
      "async_op a Work; "
      "None without, and for a non-member. Raises DistBackendError, with the ranks at fault, where "
      "a rank fails, does"
      " not come within `timeout` (None: the group's), or makes another call.");
  module.def(
      "gather",
      [](const Tensor& tensor, List gather_list, Rank dst, const Group& group, bool async_op,
         Rank group_dst, Timeout timeout) {
        const GatherOptions options{.gather_list = std::move(gather_list).value_or(TensorList{}),
                                    .dst = dst,
                                    .group = group,
                                    .async_op = async_op,
                                    .group_dst = group_dst,
                                    .timeout = timeout};
        return blocking(group, [&] { return gather(tensor, options); });
      },
      py::arg("tensor"), py::arg("gather_list") = py::none(), py::arg("dst") = py::none(),
      no_group(), synchronous(), py::arg("group_dst") = py::none(), py::kw_only(), own_timeout(),
      "On dst (0 where none is given) gather_list[r] becomes the tensor of member r; elsewhere the "
      "list is None or "
      "empty. dst: a rank of the default group; group_dst: of `group`. With async_op a Work; None "
      "without, and for a "
      "non-member. Raises DistBackendError, with the ranks at fault, where a rank fails, does not "
      "come within `timeout` (None: the group's), or makes another call.");
  module.def(
      "scatter",
      [](const Tensor& tensor, List scatter_list, Rank src, const Group& group, bool async_op,
         Rank group_src, Timeout timeout) {
        const ScatterOptions options{.scatter_list = std::move(scatter_list).value_or(TensorList{}),
                                     .src = src,
                                     .group = group,
                                     .async_op = async_op,
                                     .group_src = group_src,
                                     .timeout = timeout};
        return blocking(group, [&] { return scatter(tensor, options); });
      },
      py::arg("tensor"), py::arg("scatter_list") = py::none(), py::arg("src") = py::none(),
      no_group(), synchronous(), py::arg("group_src") = py::none(), py::kw_only(), own_timeout(),
      "Entry r of src's list (src is 0 where none is given) goes to member r's tensor: same shape "
      "and dtype "
      "everywhere. Off src the list is None or empty. With async_op a Work; None without, and for "
      "a non-member. "
      "Raises DistBackendError, with the ranks at fault, where a rank fails, does not come within "
      "`timeout` (None: the group's), or makes another call.");
}

void bind_reductions(py::module_& module) {
  module.def(
      "all_reduce",
      [](const Tensor& tensor, ReduceOp op, const Group& group, bool async_op, Timeout timeout,
         const Name& compression) {
        return blocking(group, [&] {
          return all_reduce(tensor, {.op = op,
                                     .group = group,
                                     .async_op = async_op,
                                     .timeout = timeout,
                                     .compression = compression_of(compression)});
        });
      },
      py::arg("tensor"), sum(), no_group(), synchronous(), py::kw_only(), own_timeout(),
      no_compression(),
      "The elements of all members' tensors combined by `op`, in place: the same bits on every "
      "rank. Same shape and "
      "dtype everywhere; dense of any dtype that `op` is defined on, or sparse COO floats. With "
      "async_op a Work; None"
      " without, and for a non-member. Raises DistBackendError, with the ranks at fault, where a "
      "rank fails, does not"
      " come within `timeout` (None: the group's), or makes another call.");
  module.def(
      "all_reduce_coalesced",
      [](const TensorList& tensors, ReduceOp op, const Group& group, bool async_op,
         Timeout timeout) {
        return blocking(group, [&] {
          return all_reduce_coalesced(
              tensors, {.op = op, .group = group, .async_op = async_op, .timeout = timeout});
        });
      },
      py::arg("tensors"), sum(), no_group(), synchronous(), py::kw_only(), own_timeout(),
      "`all_reduce` of each tensor of a list, as one call. With async_op a Work; None without, and "
      "for a non-member. "
      "Raises DistBackendError, with the ranks at fault, where a rank fails, does not come within "
      "`timeout` (None: the group's), or makes another call.");
  module.def(
      "reduce_scatter",
      [](const Tensor& output, const TensorList& input_list, ReduceOp op, const Group& group,
         bool async_op, Timeout timeout, const Name& compression) {
        return blocking(group, [&] {
          return reduce_scatter(output, input_list,
                                {.op = op,
                                 .group = group,
                                 .async_op = async_op,
                                 .timeout = timeout,
                                 .compression = compression_of(compression)});
        });
      },
      py::arg("output"), py::arg("input_list"), sum(), no_group(), synchronous(), py::kw_only(),
      own_timeout(), no_compression(),
      "Member r gets, in `output`, entry r of all members' input lists combined by `op`. A list "
      "has one tensor for "
      "each member; entries may differ in size. With async_op a Work; None without, and for a "
      "non-member. Raises "
      "DistBackendError, with the ranks at fault, where a rank fails, does not come within "
      "`timeout` (None: the group's), or "
      "makes another call.");
  module.def(
      "reduce_scatter_tensor",
      [](const Tensor& output, const Tensor& input, ReduceOp op, const Group& group, bool async_op,
         Timeout timeout, const Name& compression) {
        return blocking(group, [&] {
          return reduce_scatter_tensor(output, input,
                                       {.op = op,
                                        .group = group,
                                        .async_op = async_op,
                                        .timeout = timeout,
                                        .compression = compression_of(compression)});
        });
      },
      py::arg("output"), py::arg("input"), sum(), no_group(), synchronous(), py::kw_only(),
      own_timeout(), no_compression(),
      "`reduce_scatter` of one tensor: `input` is the members' parts concatenated along dimension "
      "0 or stacked along "
      "a new one, `output` is one part. With async_op a Work; None without, and for a non-member. "
      "Raises "
      "DistBackendError, with the ranks at fault, where a rank fails, does not come within "
      "`timeout` (None: the group's), or "
      "makes another call.");
  module.def(
      "reduce_scatter_coalesced",
      [](const TensorList& output_tensors, const std::vector<TensorList>& input_tensor_lists,
         ReduceOp op, const Group& group, bool async_op, Timeout timeout) {
        return blocking(group, [&] {
          return reduce_scatter_coalesced(
              output_tensors, input_tensor_lists,
              {.op = op, .group = group, .async_op = async_op, .timeout = timeout});
        });
      },
      py::arg("output_tensors"), py::arg("input_tensor_lists"), sum(), no_group(), synchronous(),
      py::kw_only(), own_timeout(),
      "input_tensor_lists[r][i] of all members, combined by `op`, becomes output_tensors[i] of "
      "member r, as one call. "
      "With async_op a Work; None without, and for a non-member. Raises DistBackendError, with the "
      "ranks at fault, where a rank fails, "
      "does not come within `timeout` (None: the group's), or makes another call.");
}

/// Apart from `all_reduce`, whose calls an argument more would slow down.
void bind_error_feedback(py::module_& module) {
  module.def("_all_reduce_with_feedback",
             [](const Tensor& tensor, const Tensor& feedback, ReduceOp op, const Group& group,
                bool async_op, Timeout timeout, const Name& compression) {
               return blocking(group, [&] {
                 return all_reduce(tensor, {.op = op,
                                            .group = group,
                                            .async_op = async_op,
                                            .timeout = timeout,
                                            .compression = compression_of(compression),
                                            .feedback = feedback});
               });
             });
}

void bind_exchanges(py::module_& module) {
  module.def(
      "all_gather",
      [](const TensorList& tensor_list, const Tensor& tensor, const Group& group, bool async_op,
         Timeout timeout, const Name& compression) {
        return blocking(group, [&] {
          return all_gather(tensor_list, tensor,
                            {.group = group,
                             .async_op = async_op,
                             .timeout = timeout,
                             .compression = compression_of(compression)});
        });
      },
      py::arg("tensor_list"), py::arg("tensor"), no_group(), synchronous(), py::kw_only(),
      own_timeout(), no_compression(),
      "tensor_list[r] becomes member r's tensor, on all members; entries may differ in size. With "
      "async_op a Work; "
      "None without, and for a non-member. Raises DistBackendError, with the ranks at fault, where "
      "a rank fails, does"
      " not come within `timeout` (None: the group's), or makes another call.");
  module.def(
      "all_gather_into_tensor",
      [](const Tensor& output_tensor, const Tensor& input_tensor, const Group& group, bool async_op,
         Timeout timeout, const Name& compression) {
        return blocking(group, [&] {
          return all_gather_into_tensor(output_tensor, input_tensor,
                                        {.group = group,
                                         .async_op = async_op,
                                         .timeout = timeout,
                                         .compression = compression_of(compression)});
        });
      },
      py::arg("output_tensor"), py::arg("input_tensor"), no_group(), synchronous(), py::kw_only(),
      own_timeout(), no_compression(),
      "`all_gather` into one tensor: the members' tensors concatenated along dimension 0 or "
      "stacked along a new one. "
      "With async_op a Work; None without, and for a non-member. Raises DistBackendError, with the "
      "ranks at fault, "
      "where a rank fails, does not come within `timeout` (None: the group's), or makes another "
      "call.");
  module.def(
      "all_gather_coalesced",
      [](const std::vector<TensorList>& output_tensor_lists, const TensorList& input_tensor_list,
         const Group& group, bool async_op, Timeout timeout) {
        return blocking(group, [&] {
          return all_gather_coalesced(output_tensor_lists, input_tensor_list,
                                      {.group = group, .async_op = async_op, .timeout = timeout});
        });
      },
      py::arg("output_tensor_lists"), py::arg("input_tensor_list"), no_group(), synchronous(),
      py::kw_only(), own_timeout(),
      "`all_gather` of several tensors as one call: output_tensor_lists[r] becomes the list of "
      "member r. With "
      "async_op a Work; None without, and for a non-member. Raises DistBackendError, with the "
      "ranks at fault, where a"
      " rank fails, does not come within `timeout` (None: the group's), or makes another call.");
  module.def(
      "all_to_all_single",
      [](const Tensor& output, const Tensor& input, Splits output_split_sizes,
         Splits input_split_sizes, const Group& group, bool async_op, Timeout timeout) {
        const AllToAllSingleOptions options{
            .output_split_sizes =
                std::move(output_split_sizes).value_or(std::vector<std::int64_t>{}),
            .input_split_sizes = std::move(input_split_sizes).value_or(std::vector<std::int64_t>{}),
            .group = group,
            .async_op = async_op,
            .timeout = timeout};
        return blocking(group, [&] { return all_to_all_single(output, input, options); });
      },
      py::arg("output"), py::arg("input"), py::arg("output_split_sizes") = py::none(),
      py::arg("input_split_sizes") = py::none(), no_group(), synchronous(), py::kw_only(),
      own_timeout(),
      "Dimension 0 of `input` is cut into one piece for each member, which lands in its `output`, "
      "in the order of "
      "ranks. Sizes of the pieces (rows) are equal where no splits are given (None or empty). With "
      "async_op a Work; "
      "None without, and for a non-member. Raises DistBackendError, with the ranks at fault, where "
      "a rank fails, does"
      " not come within `timeout` (None: the group's), or makes another call.");
  module.def(
      "all_to_all",
      [](const TensorList& output_tensor_list, const TensorList& input_tensor_list,
         const Group& group, bool async_op, Timeout timeout) {
        return blocking(group, [&] {
          return all_to_all(output_tensor_list, input_tensor_list,
                            {.group = group, .async_op = async_op, .timeout = timeout});
        });
      },
      py::arg("output_tensor_list"), py::arg("input_tensor_list"), no_group(), synchronous(),
      py::kw_only(), own_timeout(),
      "Entry r of the input list goes to member r; output_tensor_list[r] becomes what member r had "
      "for this one. "
      "Sizes may differ. With async_op a Work; None without, and for a non-member. Raises "
      "DistBackendError, with the "
      "ranks at fault, where a rank fails, does not come within `timeout` (None: the group's), or "
      "makes "
      "another call.");
  module.def(
      "barrier",
      [](const Group& group, bool async_op, std::optional<std::vector<int>> device_ids,
         std::optional<Duration> timeout) {
        const BarrierOptions options{
            .group = group,
            .async_op = async_op,
            .device_ids = std::move(device_ids).value_or(std::vector<int>{}),
            .timeout = timeout};
        return blocking(group, [&] { return barrier(options); });
      },
      no_group(), synchronous(), py::arg("device_ids") = py::none(),
      py::arg("timeout") = py::none(),
      "Returns when all members have come, within `timeout` (datetime.timedelta; None: the "
      "group's). device_ids: the accelerator on which its backend makes the barrier, as a list. "
      "With async_op a Work; None without, and for a non-member. Raises DistBackendError, with the "
      "ranks at fault, where a rank fails, "
      "does not come in time, or makes another call.");
}

}  // namespace

Compression compression_of(const std::optional<std::string>& name) {
  if (!name) return Compression::none;
  if (*name == "bf16") return Compression::bf16;
  if (*name == "int8") return Compression::int8;
  if (*name == "int4") return Compression::int4;
  return static_cast<Compression>(0xff);
}

void bind_collectives(py::module_& module) {
  bind_rooted(module);
  bind_reductions(module);
  bind_error_feedback(module);
  bind_exchanges(module);
}

}  // namespace muster::python
