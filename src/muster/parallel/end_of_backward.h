/// When a backward pass ends.
#pragma once

#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace muster::parallel {

/// Called within a backward pass: at its end autograd calls `at_end`, whose exceptions leave the
/// pass. Where an exception ends the pass before, `when_broken` is called instead. Either runs on
/// one of autograd's threads or on the one that called backward.
template <class AtEnd, class WhenBroken>
void at_end_of_backward(AtEnd at_end, WhenBroken when_broken) {
  static_assert(std::is_nothrow_invocable_v<WhenBroken&>,
                "it is called where an exception is under way");
  /// Lives as long as autograd keeps the callback: after an exception it is dropped uncalled.
  struct Watch {
    Watch(AtEnd&& at_end, WhenBroken&& when_broken)
        : at_end(std::move(at_end)), when_broken(std::move(when_broken)) {}
    ~Watch() {
      if (!ended) when_broken();
    }
    AtEnd at_end;
    WhenBroken when_broken;
    bool ended = false;
  };
  torch::autograd::Engine::get_default_engine().queue_callback(
      [watch = std::make_shared<Watch>(std::move(at_end), std::move(when_broken))] {
        watch->ended = true;
        watch->at_end();
      });
}

}  // namespace muster::parallel
