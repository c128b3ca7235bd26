// SPDX-License-Identifier: BSD-3-Clause
/// Hooks for bindings of another language around communication on autograd's threads.
#pragma once

#include <functional>

#include "muster/process_group.h"

namespace muster::parallel {

/// Callbacks of a language binding, used where autograd's threads communicate.
struct BackwardFrame {
  /// Called in the handler of an exception that is about to leave backward; may throw another one
  /// instead.
  std::function<void()> throw_as = {};
  /// Must call `wait` once, on the same thread. `wait` blocks on `group` until backward's data is
  /// there.
  std::function<void(const Group& group, const std::function<void()>& wait)> wait_in = {};
};

}  // namespace muster::parallel
