// SPDX-License-Identifier: BSD-3-Clause
#include "train/fsdp/shared_pass.h"

#include <algorithm>
#include <utility>

#include "train/fsdp/sharded_unit_state.h"
#include "train/modules/mixed_precision.h"

namespace muster::parallel {

std::vector<at::Tensor> SharedPass::before_forward(ShardedUnit& unit, std::size_t member,
                                                   std::vector<at::Tensor> inputs) {
  // A checkpoint recomputes one module without the others.
  if (is_in_backward()) return unit.before_forward(std::move(inputs));
  if (is_running_ && ran_[member]) leave_forward(unit);
  if (!is_running_) {
    inputs = unit.before_forward(std::move(inputs));
    is_running_ = true;
  } else if (precision_.cast_forward_inputs) {
    for (at::Tensor& input : inputs)
      if (input.defined()) input = cast_floating_point(input, precision_.param_dtype);
  }
  return inputs;
}

void SharedPass::after_forward(ShardedUnit& unit, std::size_t member,
                               const std::vector<at::Tensor>& outputs) {
  if (is_in_backward()) return unit.after_forward(outputs);
  ran_[member] = true;
  outputs_.insert(outputs_.end(), outputs.begin(), outputs.end());
  if (!std::ranges::all_of(ran_, [](bool ran) { return ran; })) return;
  const std::vector<at::Tensor> all = outputs_;
  reset();
  unit.after_forward(all);
}

void SharedPass::leave_forward(ShardedUnit& unit) noexcept {
  reset();
  unit.leave_forward();
}

void SharedPass::reset() {
  std::fill(ran_.begin(), ran_.end(), false);
  outputs_.clear();
  is_running_ = false;
}

}  // namespace muster::parallel
