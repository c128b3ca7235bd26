/// Hooks on the nodes of autograd that accumulate gradients. Private to the reducer.
#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace muster::parallel {

class GradientHooks {
 public:
  /// Makes the hook of the leaf with this number.
  using MakeHook =
      std::function<std::unique_ptr<torch::autograd::FunctionPostHook>(std::size_t index)>;

  /// On each of the leaves. One that is frozen for now has no node.
  GradientHooks(std::vector<at::Tensor> leaves, MakeHook make);
  ~GradientHooks() { detach(); }
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  /// The leaves have new nodes.
  void attach_anew();
  /// After torch::load, which gives a parameter other memory, and where one was frozen or is
  /// trained again, autograd knows the parameter anew, without our hook.
  void follow_changes();
  void detach();
  /// Whether there is no other hook on the leaf.
  bool is_only_one(std::size_t index) const {
    return accumulators_[index]->post_hooks().size() == 1;
  }
  /// Those of the first `count` leaves on which the outputs do not depend.
  std::vector<std::size_t> unused_by(std::span<const at::Tensor> outputs, std::size_t count) const;

 private:
  using Node = torch::autograd::Node;
  using NodeRef =
      decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  void attach();

  const std::vector<at::Tensor> leaves_;
  const MakeHook make_;
  std::vector<NodeRef> accumulators_;  // null for what is frozen
  std::vector<std::uintptr_t> keys_;
};

}  // namespace muster::parallel
