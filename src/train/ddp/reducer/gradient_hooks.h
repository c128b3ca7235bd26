// SPDX-License-Identifier: BSD-3-Clause
/// Hooks on autograd's gradient accumulators. Private to the reducer.
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
  /// Makes the hook of leaf `index`.
  using MakeHook =
      std::function<std::unique_ptr<torch::autograd::FunctionPostHook>(std::size_t index)>;

  /// Attaches a hook to each leaf. A leaf that is frozen has no accumulator.
  GradientHooks(std::vector<at::Tensor> leaves, MakeHook make);
  ~GradientHooks() { detach(); }
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  /// Reattaches to the leaves' new accumulators.
  void reattach();
  /// Reattaches where autograd has replaced an accumulator, dropping our hook: after torch::load,
  /// which replaces a parameter's memory, and after a parameter was frozen or unfrozen.
  void reattach_if_changed();
  void detach();
  /// Whether ours is the only hook on the leaf.
  bool is_only_hook(std::size_t index) const {
    return accumulators_[index]->post_hooks().size() == 1;
  }
  /// Those of the first `count` leaves that the outputs do not depend on.
  std::vector<std::size_t> unused_by(std::span<const at::Tensor> outputs, std::size_t count) const;

 private:
  using Node = torch::autograd::Node;
  using NodeRef =
      decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  void attach();

  const std::vector<at::Tensor> leaves_;
  const MakeHook make_;
  std::vector<NodeRef> accumulators_;  // null for frozen leaves
  std::vector<std::uintptr_t> keys_;
};

}  // namespace muster::parallel
