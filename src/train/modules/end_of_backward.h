// SPDX-License-Identifier: BSD-3-Clause
/// Callbacks at the end of a backward pass.
#pragma once

#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace muster::parallel {

/// Must be called within a backward pass. Autograd calls `at_end` at its end, and its exceptions
/// propagate out of the pass. If an exception ends the pass earlier, `when_broken` is called
/// instead. Either runs on one of autograd's threads or on the thread that called backward.
template <class AtEnd, class WhenBroken>
void at_end_of_backward(AtEnd at_end, WhenBroken when_broken) {
  static_assert(std::is_nothrow_invocable_v<WhenBroken&>,
                "it is called where an exception is under way");
  /// Destroyed with autograd's callback; after an exception, without having been called.
  struct BackwardWatch {
    BackwardWatch(AtEnd&& at_end, WhenBroken&& when_broken)
        : at_end(std::move(at_end)), when_broken(std::move(when_broken)) {}
    ~BackwardWatch() {
      if (!ended) when_broken();
    }
    AtEnd at_end;
    WhenBroken when_broken;
    bool ended = false;
  };
  torch::autograd::Engine::get_default_engine().queue_callback(
      [watch = std::make_shared<BackwardWatch>(std::move(at_end), std::move(when_broken))] {
        watch->ended = true;
        watch->at_end();
      });
}

}  // namespace muster::parallel
