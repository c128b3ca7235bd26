/// A unit of FSDP: parameters that are gathered, used, and given back together, in a forward pass
/// and again in the backward pass.
///
/// Forward gathers them, runs, and gives them back. A hook on what forward returned gathers them
/// again as soon as its gradient comes. A node that stands in front of what forward was given ends
/// the unit's part of backward: autograd comes to it when all that forward did is behind it. There
/// each rank gets its shard of the averages, and the whole parameters are given back; a unit none
/// of whose inputs wants a gradient does so at the end of the pass. So every rank makes the same
/// calls in the same order, whichever parameters its forward used, as long as inputs want gradients
/// on all ranks or on none; reductions of two units differ in length, so that ranks out of step are
/// told. Units may stand inside each other: the outer one then has what the inner ones left. After:
/// Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "muster/group/process_group.h"
#include "muster/parallel/mixed_precision.h"
#include "muster/parallel/module_parts.h"
#include "muster/parallel/reducer.h"
#include "muster/parallel/sharded_parameters.h"

namespace muster::parallel {

struct ShardedUnitOptions {
  Group group = nullptr;  ///< the ranks that share the parameters; null: the default group
  /// Of whole parameters, of what forward is given, of what gradients travel as, and of buffers.
  /// keep_low_precision_grads changes nothing.
  MixedPrecision mixed_precision = {};
  /// Without cast_forward_inputs: what forward is given is cast where it is not called inside of
  /// another unit's.
  bool cast_root_forward_inputs = false;
  /// Whether whole parameters are given back between forward and backward; else they stay in memory
  /// for backward.
  bool reshard_after_forward = true;
  /// Rank 0's values go to all before they are sharded; else each rank keeps its shard of its own.
  bool sync_module_states = true;
  BackwardFrame frame = {};
};

/// Used by one thread at a time; its hooks run on autograd's. Neither copied nor moved: autograd
/// knows where it stands.
class ShardedUnit {
 public:
  /// Collective. Throws DistError on all members where their parameters differ, naming the first
  /// difference; and where one is no leaf, or is part of another unit already.
  ShardedUnit(const ModuleParts& parts, const ShardedUnitOptions& options);
  ~ShardedUnit();
  ShardedUnit(const ShardedUnit&) = delete;
  ShardedUnit& operator=(const ShardedUnit&) = delete;

  /// Around the unit's part of a forward pass. Collective. `inputs`: the tensors that it was given,
  /// by value; returns what is to be used in their place. `outputs`: the tensors that it returns.
  /// Every before_forward() is followed by after_forward(), or by leave_forward() where an
  /// exception came between.
  std::vector<at::Tensor> before_forward(std::vector<at::Tensor> inputs);
  void after_forward(std::span<const at::Tensor> outputs);
  void leave_forward() noexcept;

  /// Collective: the whole parameters stand in their places until reshard(), or the end of the next
  /// forward pass.
  void unshard();
  void reshard();
  /// While false, backward adds whole gradients up on this rank. The first pass of a unit of this
  /// group after it averages the sums.
  void set_require_sync(bool on);
  bool require_sync() const;
  /// Forgets those sums.
  void drop_gradients();

  ShardedParameters& parameters();
  const Group& group() const;
  /// Collective: whole parameters, in their own dtype, stand in their places until end_summon().
  /// Not in a forward or backward pass.
  void summon();
  void end_summon(bool writeback);
  bool is_summoned() const;

 private:
  struct Family;
  struct State;
  std::shared_ptr<State> state_;
};

/// Whether the tensor is a parameter of a unit that exists.
bool is_sharded(const at::Tensor& parameter);

}  // namespace muster::parallel
