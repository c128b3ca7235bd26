// SPDX-License-Identifier: BSD-3-Clause
/// What the bindings of model wrappers share: modules, options and hooks of Python's in C++.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "blocking.h"
#include "muster/distributed_data_parallel.h"
#include "train/modules/backward_frame.h"
#include "train/modules/module_parts.h"

namespace muster::python {

using Released = pybind11::call_guard<pybind11::gil_scoped_release>;

/// A property whose getter and setter run without the GIL: they take the object's lock.
template <auto Member>
pybind11::cpp_function released() {
  return pybind11::cpp_function(Member, Released());
}

inline parallel::BackwardFrame frame() {
  return {.throw_as = throw_in_python,
          .wait_in = [](const Group& group, const std::function<void()>& wait) {
            const pybind11::gil_scoped_acquire held;
            blocking(group, wait);
          }};
}

inline std::vector<parallel::ModuleParts::Named> named(
    const std::vector<std::pair<std::string, at::Tensor>>& tensors,
    const std::vector<at::Tensor>& sparse) {
  std::vector<parallel::ModuleParts::Named> all;
  for (const auto& [name, tensor] : tensors) {
    const auto is_it = [&each = tensor](const at::Tensor& other) { return other.is_same(each); };
    all.push_back({name, tensor, std::any_of(sparse.begin(), sparse.end(), is_it)});
  }
  return all;
}

template <class Member>
void take(const pybind11::dict& given, const char* name, Member& member) {
  if (given.contains(name) && !given[name].is_none()) member = given[name].cast<Member>();
}

inline MixedPrecision precision_of(const pybind11::object& given) {
  MixedPrecision config;
  const auto dtype = [&given](const char* name) {
    return given.attr(name).cast<std::optional<at::ScalarType>>();
  };
  config.param_dtype = dtype("param_dtype");
  config.reduce_dtype = dtype("reduce_dtype");
  config.buffer_dtype = dtype("buffer_dtype");
  // Torch's own class has not these two.
  config.keep_low_precision_grads =
      pybind11::getattr(given, "keep_low_precision_grads", pybind11::bool_(false)).cast<bool>();
  config.cast_forward_inputs =
      pybind11::getattr(given, "cast_forward_inputs", pybind11::bool_(true)).cast<bool>();
  return config;
}

}  // namespace muster::python
