/// Calls of autograd's threads into muster, where another language is around both.
#pragma once

#include <functional>

#include "muster/group/process_group.h"

namespace muster::parallel {

/// What a language around C++ has to do where autograd's threads communicate.
struct BackwardFrame {
  /// Called in the handler of what is about to leave backward; may throw another exception in its
  /// place.
  std::function<void()> throw_as = {};
  /// Calls `wait`, once, on the same thread, which blocks on `group` until what backward needs is
  /// there.
  std::function<void(const Group& group, const std::function<void()>& wait)> wait_in = {};
};

}  // namespace muster::parallel
