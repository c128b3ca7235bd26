// SPDX-License-Identifier: BSD-3-Clause
/// One stage's graphs: what its forwards have recorded and its backwards have yet to use.
///
/// `pipeline/` walks a table of `pipeline_table/`: `schedule.cc` takes the actions in turn,
/// `stage_passes.h` computes, `stage_messages.h` sends and receives. It may include every layer up
/// to `parallel`. Its tests: `ctest -R '^pipeline\.'`.
#pragma once

#include <map>
#include <optional>

#include "muster/pipeline.h"

namespace muster::pipeline {

class StagePasses {
 public:
  explicit StagePasses(PipelineStage stage) : stage_(std::move(stage)) {}

  int stage() const { return stage_.stage; }
  /// The device that received tensors are put on.
  at::Device device() const;

  /// Returns the outputs, detached. `inputs` are leaves of the graph; gradients are computed for
  /// those of floating-point types if `wants_input_gradients`. With a loss, backward begins there,
  /// with `scale` as its gradient.
  struct ForwardCall {
    TensorList inputs;
    bool wants_input_gradients = false;
    std::function<at::Tensor(const TensorList& outputs)> loss = {};
    double scale = 1;
  };
  struct ForwardResult {
    TensorList outputs;
    at::Tensor loss;
  };
  ForwardResult forward(int micro_batch, const ForwardCall& call);

  /// `gradients` are those of the floating-point outputs; empty if forward had a loss. Returns
  /// those of the floating-point inputs if forward wanted them; zeros for an input without effect.
  TensorList backward(int micro_batch, const TensorList& gradients);
  TensorList backward_input(int micro_batch, const TensorList& gradients);
  /// Adds to the parameters' gradients, and lets the graph go.
  void backward_weight(int micro_batch);

  void forget_all() { graphs_.clear(); }

 private:
  struct StageGraph {
    TensorList inputs;                      // those that gradients are computed for
    TensorList roots;                       // those outputs that have a graph, or the loss
    TensorList gradients;                   // of the roots
    std::vector<std::size_t> root_outputs;  // a root's place among the floating-point outputs
  };
  void take_gradients(StageGraph& graph, const TensorList& gradients) const;

  PipelineStage stage_;
  std::map<int, StageGraph> graphs_;  // by micro-batch
};

}  // namespace muster::pipeline
