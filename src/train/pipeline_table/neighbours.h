// SPDX-License-Identifier: BSD-3-Clause
/// Which stage's message an action of a schedule needs, and where its own goes: what the check
/// proves and the runtime does.
#pragma once

#include <optional>

#include "muster/pipeline_table.h"

namespace muster::pipeline {

/// The stage `step` further in the direction of the action's pass; none beyond the model's ends and
/// for weights.
inline std::optional<int> stage_along(const PipelineAction& action, int step, int stages) {
  if (action.pass == PipelinePass::backward_weight) return {};
  const int stage = action.stage + (action.pass == PipelinePass::forward ? step : -step);
  return stage >= 0 && stage < stages ? std::optional(stage) : std::nullopt;
}
/// The stage whose message the action needs.
inline std::optional<int> source_of(const PipelineAction& action, int stages) {
  return stage_along(action, -1, stages);
}
/// The stage to which the action sends.
inline std::optional<int> target_of(const PipelineAction& action, int stages) {
  return stage_along(action, 1, stages);
}

}  // namespace muster::pipeline
