// SPDX-License-Identifier: BSD-3-Clause
#include "train/ddp/reducer/gradient_hooks.h"

#include <torch/csrc/autograd/function.h>

#include <unordered_set>

namespace muster::parallel {

GradientHooks::GradientHooks(std::vector<at::Tensor> leaves, MakeHook make)
    : leaves_(std::move(leaves)), make_(std::move(make)) {
  attach();
}

void GradientHooks::attach() {
  for (std::size_t i = 0; i < leaves_.size(); ++i) {
    accumulators_.push_back(torch::autograd::impl::grad_accumulator(leaves_[i]));
    const NodeRef& node = accumulators_.back();
    keys_.push_back(node ? node->add_post_hook(make_(i)) : 0);
  }
}

void GradientHooks::detach() {
  for (std::size_t i = 0; i < accumulators_.size(); ++i)
    if (accumulators_[i]) accumulators_[i]->del_post_hook(keys_[i]);
  accumulators_.clear();
  keys_.clear();
}

void GradientHooks::reattach() {
  detach();
  attach();
}

void GradientHooks::reattach_if_changed() {
  for (std::size_t i = 0; i < accumulators_.size(); ++i) {
    if (torch::autograd::impl::grad_accumulator(leaves_[i]) != accumulators_[i]) return reattach();
  }
}

std::vector<std::size_t> GradientHooks::unused_by(std::span<const at::Tensor> outputs,
                                                  std::size_t count) const {
  std::unordered_set<Node*> seen;
  std::vector<Node*> open;
  const auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  for (const at::Tensor& output : outputs)
    if (output.defined() && output.requires_grad())
      visit(torch::autograd::impl::gradient_edge(output).function.get());
  while (!open.empty()) {
    Node* node = open.back();
    open.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  std::vector<std::size_t> unused;
  for (std::size_t i = 0; i < count; ++i)
    if (!seen.contains(accumulators_[i].get())) unused.push_back(i);
  return unused;
}

}  // namespace muster::parallel
