// SPDX-License-Identifier: BSD-3-Clause
#include "muster/functional.h"

#include "bindings.h"
#include "blocking.h"
#include "train/modules/backward_frame.h"

namespace muster::python {
namespace {

namespace py = pybind11;
using at::Tensor;
using SplitSizes = std::optional<std::vector<std::int64_t>>;

std::shared_ptr<const parallel::BackwardFrame> backward_frame() {
  static const auto frame = std::make_shared<const parallel::BackwardFrame>(
      parallel::BackwardFrame{.throw_as = throw_in_python,
                              .wait_in = [](const Group& group, const std::function<void()>& wait) {
                                const py::gil_scoped_acquire held;
                                blocking(group, wait);
                              }});
  return frame;
}

nn::FunctionalOptions on(const Group& group) {
  return {.group = group, ._frame = backward_frame()};
}
nn::ReductionOptions on(const Group& group, ReduceOp op) {
  return {.op = op, .group = group, ._frame = backward_frame()};
}

py::tuple tuple_of(const TensorList& tensors) { return py::tuple(py::cast(tensors)); }

}  // namespace

// muster/nn/functional.py has their signatures and says what they do.
void bind_functional(py::module_& module) {
  module.def("_nn_all_reduce", [](const Tensor& tensor, ReduceOp op, const Group& group) {
    return blocking(group, [&] { return nn::all_reduce(tensor, on(group, op)); });
  });
  module.def("_nn_broadcast", [](const Tensor& tensor, int src, const Group& group) {
    return blocking(group, [&] { return nn::broadcast(tensor, src, on(group)); });
  });
  module.def("_nn_reduce", [](const Tensor& tensor, int dst, ReduceOp op, const Group& group) {
    return blocking(group, [&] { return nn::reduce(tensor, dst, on(group, op)); });
  });
  module.def("_nn_gather", [](const Tensor& tensor, int dst, const Group& group) {
    return tuple_of(blocking(group, [&] { return nn::gather(tensor, dst, on(group)); }));
  });
  module.def("_nn_scatter", [](const TensorList& tensors, int src, const Group& group) {
    return blocking(group, [&] { return nn::scatter(tensors, src, on(group)); });
  });
  module.def("_nn_all_gather", [](const Tensor& tensor, const Group& group) {
    return tuple_of(blocking(group, [&] { return nn::all_gather(tensor, on(group)); }));
  });
  module.def("_nn_all_gather_into_tensor", [](const Tensor& output, const Tensor& input,
                                              const Group& group) {
    return blocking(group, [&] { return nn::all_gather_into_tensor(output, input, on(group)); });
  });
  module.def("_nn_reduce_scatter", [](const Tensor& output, const TensorList& input_list,
                                      ReduceOp op, const Group& group) {
    return blocking(group, [&] { return nn::reduce_scatter(output, input_list, on(group, op)); });
  });
  module.def("_nn_all_to_all", [](const TensorList& outputs, const TensorList& inputs,
                                  const Group& group) {
    return tuple_of(blocking(group, [&] { return nn::all_to_all(outputs, inputs, on(group)); }));
  });
  module.def("_nn_all_to_all_single",
             [](const Tensor& output, const Tensor& input, const SplitSizes& output_split_sizes,
                const SplitSizes& input_split_sizes, const Group& group) {
               return blocking(group, [&] {
                 return nn::all_to_all_single(
                     output, input, output_split_sizes.value_or(std::vector<std::int64_t>{}),
                     input_split_sizes.value_or(std::vector<std::int64_t>{}), on(group));
               });
             });
}

}  // namespace muster::python
