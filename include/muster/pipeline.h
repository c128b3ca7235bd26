// SPDX-License-Identifier: BSD-3-Clause
/// Pipeline parallelism: a model cut into stages, each on a rank of a group, and a schedule that
/// walks the micro-batches of a batch through them.
///
///   auto stage = muster::pipeline_stage(rank, Block(64));
///   muster::PipelineSchedule schedule(
///       muster::one_f_one_b_table(ranks, 8), {stage}, {.loss = mse});
///   auto result = schedule.step({inputs}, {targets});  // adds to the parameters' gradients
///
/// `pipeline_table.h` has the schedules. Modelled on torch.distributed.pipelining.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/errors.h"
#include "muster/module_wrapper.h"
#include "muster/pipeline_table.h"
#include "muster/process_group.h"
#include "muster/work.h"

namespace muster {

/// One stage of the model. Its outputs are the next stage's inputs, and dimension 0 of each is the
/// micro-batch. Outputs of floating-point types carry gradients; complex ones are refused in
/// training.
struct PipelineStage {
  int stage = 0;  ///< 0: first
  std::function<TensorList(const TensorList& inputs)> forward;
  /// The parameters for which backward_weight computes gradients. Received tensors are put on the
  /// device of the first one; on the CPU if there are none.
  TensorList parameters = {};
};

/// A stage that runs a module (a holder such as torch::nn::Linear). Its forward takes one tensor,
/// or a TensorList, and returns a tensor or a tuple or vector of tensors. A module that takes two
/// tensors gets the first two inputs.
template <class Module>
PipelineStage pipeline_stage(int stage, Module module) {
  auto forward = [module](const TensorList& inputs) mutable {
    TensorList outputs;
    if constexpr (requires { module->forward(inputs); }) {
      parallel::collect_tensors(module->forward(inputs), outputs);
    } else if constexpr (requires { module->forward(inputs[0]); }) {
      if (inputs.size() != 1)
        throw DistError("the module takes one tensor, and " + std::to_string(inputs.size()) +
                        " came");
      parallel::collect_tensors(module->forward(inputs[0]), outputs);
    } else {
      if (inputs.size() != 2)
        throw DistError("the module takes two tensors, and " + std::to_string(inputs.size()) +
                        " came");
      parallel::collect_tensors(module->forward(inputs[0], inputs[1]), outputs);
    }
    return outputs;
  };
  TensorList parameters = module->parameters();
  return {stage, std::move(forward), std::move(parameters)};
}

/// The loss of one micro-batch, one element: of the last stage's outputs and the targets.
using PipelineLoss =
    std::function<at::Tensor(const TensorList& outputs, const TensorList& targets)>;

struct PipelineScheduleOptions {
  PipelineLoss loss = {};  ///< needed on the last stage's rank, ignored elsewhere
  Group group = nullptr;   ///< null: the default group
  /// Gradients are averaged over the micro-batches, so that a loss that averages over its batch has
  /// the gradients of the whole batch. False: they are added up.
  bool scale_grads = true;
};

/// The result on the last stage's rank; empty on the others. Without gradients.
struct PipelineResult {
  TensorList outputs;  ///< of the whole batch, in order
  at::Tensor losses;   ///< one element for each micro-batch
};

/// Every member of the group constructs it and calls it alike, from one thread at a time. It uses
/// tags from 1000000 on for the group's messages. The sizes and dtypes of what a stage sends are
/// told to the receiver with the first micro-batch; other sizes fail from then on.
///
/// If a stage, a loss, a size or a message is wrong, this rank's exception names rank, stage and
/// micro-batch, and the group is aborted, so that the other ranks throw too, naming the same; a
/// rank that has already ended its step does so in its next call. Messages have the group's
/// timeout.
class PipelineSchedule {
 public:
  /// Collective. Throws DistError on all ranks, naming the ranks at fault, if the table is wrong
  /// (`check_pipeline`), not the same everywhere, for another number of ranks, or if a rank's
  /// stages are not those that the table gives it.
  PipelineSchedule(const Result<PipelineTable>& table, std::vector<PipelineStage> stages,
                   const PipelineScheduleOptions& options = {});
  ~PipelineSchedule();
  PipelineSchedule(PipelineSchedule&&) noexcept;

  /// Forward and backward of one batch; adds to the gradients of the parameters. `inputs` are used
  /// on the first stage's rank, `targets` on the last one's. Dimension 0 of each is split into
  /// equal micro-batches; a batch that cannot be aborts the group, as any failure does.
  PipelineResult step(const TensorList& inputs = {}, const TensorList& targets = {});
  /// Forward only, without gradients. Losses only if there are targets.
  PipelineResult evaluate(const TensorList& inputs = {}, const TensorList& targets = {});

  const PipelineTable& table() const;

 private:
  class Runtime;
  std::unique_ptr<Runtime> runtime_;
};

}  // namespace muster
