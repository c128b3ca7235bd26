// SPDX-License-Identifier: BSD-3-Clause
/// Options for backends, which come from Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

#include "core/group/creation/backend_registry.h"

namespace muster::python {

/// Whatever a backend of Python's understands.
struct OptionsOfPython : ProcessGroupOptions {
  explicit OptionsOfPython(std::shared_ptr<pybind11::object> object) : object(std::move(object)) {}
  const std::shared_ptr<pybind11::object> object;
};

/// Null for None; ProcessGroupNCCL.Options as what they are; anything else for a backend that
/// Python has registered.
std::shared_ptr<ProcessGroupOptions> pg_options_of(const pybind11::object& given);

}  // namespace muster::python
