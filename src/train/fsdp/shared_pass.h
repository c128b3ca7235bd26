// SPDX-License-Identifier: BSD-3-Clause
/// The forward pass of a unit of several modules.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "muster/module_wrapper.h"
#include "train/fsdp/sharded_unit.h"

namespace muster::parallel {

/// The unit's forward begins with that of whichever of its modules is called first, and ends when
/// each has run once. Calls between them are inside of it. A module that is called again
/// before all have run begins a new pass: an exception, or a pass of some of the modules alone, has
/// left the last one unfinished. Not thread-safe.
class SharedPass {
 public:
  SharedPass(std::size_t modules, MixedPrecision precision)
      : ran_(modules, false), precision_(precision) {}

  /// As ShardedUnit's functions, for module `member`.
  std::vector<at::Tensor> before_forward(ShardedUnit& unit, std::size_t member,
                                         std::vector<at::Tensor> inputs);
  void after_forward(ShardedUnit& unit, std::size_t member, const std::vector<at::Tensor>& outputs);
  void leave_forward(ShardedUnit& unit) noexcept;

 private:
  void reset();

  std::vector<bool> ran_;  // in the pass that is running
  std::vector<at::Tensor> outputs_;
  bool is_running_ = false;
  const MixedPrecision precision_;
};

}  // namespace muster::parallel
