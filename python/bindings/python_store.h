// SPDX-License-Identifier: BSD-3-Clause
/// Stores that users write in Python, as classes derived from `muster.Store`.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "muster/store.h"

namespace muster::python {

/// The C++ part of a Python object whose class derives from `Store`. Calls the methods of that
/// class. Valid only as long as the Python object lives: `kept_store` extends that.
class DerivedStore : public Store {
 public:
  DerivedStore();
};

/// A store that C++ may keep and use on any thread: `store` itself, or, for a DerivedStore, one
/// that keeps the Python object alive. Null if `store` is null. Requires the GIL.
std::shared_ptr<Store> kept_store(const std::shared_ptr<Store>& store);

}  // namespace muster::python
