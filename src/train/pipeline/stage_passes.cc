// SPDX-License-Identifier: BSD-3-Clause
#include "train/pipeline/stage_passes.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/types.h>

namespace muster::pipeline {

namespace {

/// An unused input has a gradient too: zeros.
TensorList defined(TensorList gradients, const TensorList& inputs) {
  for (std::size_t i = 0; i < gradients.size(); ++i)
    if (!gradients[i].defined()) gradients[i] = torch::zeros_like(inputs[i]);
  return gradients;
}

}  // namespace

at::Device StagePasses::device() const {
  return stage_.parameters.empty() ? at::Device(at::kCPU) : stage_.parameters.front().device();
}

StagePasses::ForwardResult StagePasses::forward(int micro_batch, const ForwardCall& call) {
  StageGraph graph;
  TensorList inputs;
  for (const auto& input : call.inputs) {
    inputs.push_back(input.detach());
    if (!call.wants_input_gradients || !input.is_floating_point()) continue;
    graph.inputs.push_back(inputs.back().requires_grad_());
  }
  const TensorList outputs = stage_.forward(inputs);
  ForwardResult result;
  for (const auto& output : outputs) result.outputs.push_back(output.detach());
  if (call.loss) {
    const auto loss = call.loss(outputs);
    if (loss.numel() != 1)
      throw DistError("the loss has " + std::to_string(loss.numel()) + " elements instead of one");
    result.loss = loss.detach().reshape({});
    if (loss.requires_grad()) {
      graph.roots = {loss};
      graph.gradients = {torch::full_like(loss, call.scale)};
    }
  } else {
    std::size_t place = 0;
    for (const auto& output : outputs) {
      if (output.is_complex() && torch::GradMode::is_enabled())
        throw DistError(
            "a complex output carries no gradient to the stage before; return its view_as_real");
      if (!output.is_floating_point()) continue;
      if (output.requires_grad()) {
        graph.roots.push_back(output);
        graph.root_outputs.push_back(place);
      }
      ++place;
    }
  }
  if (torch::GradMode::is_enabled()) graphs_[micro_batch] = std::move(graph);
  return result;
}

void StagePasses::take_gradients(StageGraph& graph, const TensorList& gradients) const {
  for (const std::size_t place : graph.root_outputs) graph.gradients.push_back(gradients.at(place));
}

TensorList StagePasses::backward(int micro_batch, const TensorList& gradients) {
  StageGraph graph = std::move(graphs_.extract(micro_batch).mapped());
  take_gradients(graph, gradients);
  if (!graph.roots.empty()) torch::autograd::backward(graph.roots, graph.gradients);
  TensorList of_inputs;
  for (const auto& input : graph.inputs) of_inputs.push_back(input.grad());
  return defined(std::move(of_inputs), graph.inputs);
}

TensorList StagePasses::backward_input(int micro_batch, const TensorList& gradients) {
  StageGraph& graph = graphs_.at(micro_batch);
  take_gradients(graph, gradients);
  if (graph.inputs.empty()) return {};
  TensorList of_inputs(graph.inputs.size());
  if (!graph.roots.empty())
    of_inputs = torch::autograd::grad(graph.roots, graph.inputs, graph.gradients,
                                      /*retain_graph=*/true, /*create_graph=*/false,
                                      /*allow_unused=*/true);
  return defined(std::move(of_inputs), graph.inputs);
}

void StagePasses::backward_weight(int micro_batch) {
  const StageGraph graph = std::move(graphs_.extract(micro_batch).mapped());
  TensorList trained;
  for (const auto& parameter : stage_.parameters)
    if (parameter.requires_grad()) trained.push_back(parameter);
  if (trained.empty() || graph.roots.empty()) return;
  torch::autograd::backward(graph.roots, graph.gradients, /*retain_graph=*/false,
                            /*create_graph=*/false, trained);
}

}  // namespace muster::pipeline
