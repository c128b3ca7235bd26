// SPDX-License-Identifier: BSD-3-Clause
/// Events of the units of a sharded model, in order: for timelines and for tests of overlap. Then
/// the units themselves.
#pragma once

#include <ATen/core/Tensor.h>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "muster/fully_sharded_data_parallel.h"
#include "muster/process_group.h"
#include "train/ddp/reducer/reducer.h"
#include "train/fsdp/sharded_parameters.h"
#include "train/modules/mixed_precision.h"
#include "train/modules/module_parts.h"

namespace muster::parallel {
enum class ShardedEvent {
  gather_started,   ///< whole parameters were asked for, ahead of their use
  gather_finished,  ///< they are there; noticed on a thread of its own
  forward_began,    ///< the parameters are whole, the module's forward follows
  forward_ended,
  backward_began,  ///< the parameters are whole, the unit's part of backward follows
  backward_ended,  ///< all of its gradients are there
  reduced,         ///< this rank has taken its shards of the averages
};

/// The name, as in the enumeration.
const char* name_of(ShardedEvent event);

/// Thread-safe. Grows until it is cleared.
class ShardedTimeline {
 public:
  struct TimelineEntry {
    std::string unit;
    ShardedEvent event;
    std::chrono::steady_clock::time_point at;
  };
  void add(const std::string& unit, ShardedEvent event) {
    const std::lock_guard lock(mutex_);
    entries_.push_back({unit, event, std::chrono::steady_clock::now()});
  }
  std::vector<TimelineEntry> entries() const {
    const std::lock_guard lock(mutex_);
    return entries_;
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    entries_.clear();
  }

 private:
  mutable std::mutex mutex_;
  std::vector<TimelineEntry> entries_;
};

// A unit of FSDP: parameters that are gathered, used and freed together, in forward and again in
// backward.
//
// Forward gathers them, runs, and frees them. A hook on forward's outputs gathers them again when
// the first gradient arrives. A node in front of forward's inputs ends the unit's part of
// backward: autograd reaches it after everything forward did. There each rank gets its shard of
// the averages, and the whole parameters are freed. A unit none of whose inputs requires a
// gradient does this at the end of the pass. Every rank thus makes the same calls in the same
// order, whichever parameters its forward used, provided that inputs require gradients on all
// ranks or on none. Reductions of two units differ in length, so that ranks out of step get an
// error. Units may be nested; the outer unit then has the parameters that its inner units do not.
//
// A unit may begin to gather the next one's parameters before its own computation, by an
// asynchronous call, so that both go on at the same time (prefetch). The next unit is that of a
// list, or in forward the one that followed in the last pass, and in backward the one that came
// before in forward: the same on all ranks. Unused parameters are freed at the end of the pass.
// Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.

struct ShardedUnitOptions {
  Group group = nullptr;  ///< the ranks that shard the parameters; null: the default group
  /// The ranks that hold the same shard as this one, for hybrid sharding; null: none.
  Group replicas = nullptr;
  /// False: every rank of `group` stores whole parameters (NO_SHARD); without `replicas`.
  bool shards = true;
  /// Dtypes of whole parameters, forward's inputs, reduced gradients and buffers.
  /// keep_low_precision_grads has no effect.
  MixedPrecision mixed_precision = {};
  /// Without cast_forward_inputs: cast forward's inputs if it is not called inside another unit's
  /// forward.
  bool cast_root_forward_inputs = false;
  /// Without reduce_dtype: reduce gradients in the parameters' own dtype, not in param_dtype.
  bool reduce_in_own_dtype = false;
  /// The place of whole parameters between forward and backward. `Keep::part`: divided among
  /// `part_ranks` consecutive ranks of `group`, a divisor of its size.
  Keep after_forward = Keep::nothing;
  int part_ranks = 0;
  /// Broadcast rank 0's values before sharding; otherwise each rank keeps the shard of its own
  /// values.
  bool sync_module_states = true;
  BackwardFrame frame = {};
  std::optional<BackwardPrefetch> backward_prefetch = BackwardPrefetch::BACKWARD_PRE;
  bool forward_prefetch = false;
  /// As in ShardedCommunication.
  Compression gradient_compression = Compression::none;
  Compression parameter_compression = Compression::none;
  std::optional<at::Device> device = {};  ///< of whole parameters; default: the parameters' own
  /// Shards, their gradients and so the optimizer's state are on the CPU.
  bool cpu_offload = false, pin_memory = true;
  std::shared_ptr<ShardedTimeline> timeline = {};  ///< null: nothing is recorded
  /// Divide each parameter by itself: one dimension per parameter of the unit's parts, negative
  /// ones counted from the last. Default: flat (ShardedParameters).
  std::optional<std::vector<std::int64_t>> shard_dims = {};
};

/// Not thread-safe; its hooks run on autograd's threads. Neither copyable nor movable, because
/// autograd holds its address.
class ShardedUnit {
 public:
  /// Collective. Throws DistError on all members and names the first difference if their parameters
  /// differ; also if one is no leaf or belongs to another unit.
  ShardedUnit(const ModuleParts& parts, const ShardedUnitOptions& given_options);
  ~ShardedUnit();
  ShardedUnit(const ShardedUnit&) = delete;
  ShardedUnit& operator=(const ShardedUnit&) = delete;

  /// Enclose the unit's part of a forward pass. Collective. `inputs` are the tensors passed to it,
  /// by value; before_forward() returns their replacements. `outputs` are the tensors it returns.
  /// Every before_forward() is followed by after_forward(), or by leave_forward() if an exception
  /// was thrown.
  std::vector<at::Tensor> before_forward(std::vector<at::Tensor> inputs);
  void after_forward(std::span<const at::Tensor> outputs);
  void leave_forward() noexcept;

  /// Collective. Makes the parameters whole until reshard() or the end of the next forward pass.
  void unshard();
  /// Begins that and returns at once; the next unshard() or forward waits for it.
  void start_unshard();
  /// Frees whole parameters, unless a pass needs them.
  void reshard();
  bool is_unsharded() const;
  /// While false, backward accumulates whole gradients on this rank. The first later pass of a unit
  /// of this group averages the sums.
  void set_require_sync(bool on);
  bool require_sync() const;
  /// Discards those sums.
  void drop_gradients();
  /// Collective. Averages sums that wait, though require_sync() is false.
  void reduce_now();
  /// Frees whole parameters and sums, whichever pass they belong to: for use after an exception.
  /// Throws DistError if the exception has ended the group.
  void reset();

  /// Between passes.
  void set_after_forward(Keep keep);
  void set_keep_after_backward(bool on);
  /// False: backward does not need the parameters' values.
  void set_unshard_in_backward(bool on);
  /// The units that begin to gather when this one's forward, or its part of backward, begins;
  /// nothing: as the options say. Held weakly.
  void set_forward_prefetch(const std::optional<std::vector<ShardedUnit*>>& units);
  void set_backward_prefetch(const std::optional<std::vector<ShardedUnit*>>& units);

  ShardedParameters& parameters();
  const ShardedParameters& parameters() const;
  const Group& group() const;
  const Group& replicas() const;  ///< null: none
  /// Whether this is the first of all ranks that have the model.
  bool is_first() const;
  /// Whether no other unit was around this one in its last forward; true before the first.
  bool was_root() const;
  /// Collective. Makes the parameters whole, in their own dtype, until end_summon(). Not allowed
  /// during a forward or backward pass.
  void summon();
  void end_summon(bool writeback);
  bool is_summoned() const;

 private:
  struct Family;
  struct State;
  std::shared_ptr<State> state_;
};

/// Whether the tensor is a parameter of an existing unit.
bool is_sharded(const at::Tensor& parameter);

/// The elements that a parameter of a unit holds between passes: a box of the whole, of the
/// parameter's own sizes, or where flat one stretch of its row-major elements.
struct ShardedPart {
  std::vector<std::int64_t> sizes;  ///< of the whole parameter
  /// By rows: where the box begins, and the dimension that is divided.
  std::optional<std::vector<std::int64_t>> offsets = {};
  std::optional<std::int64_t> dim = {};
  std::int64_t first = 0;  ///< flat: this rank's first element; as many follow as it holds
  Group group = nullptr, replicas = nullptr;  ///< as in ShardingOptions
};
/// None for a tensor that is no parameter of a unit. Throws DistError where the parameter is whole
/// now, within a pass or by unshard().
std::optional<ShardedPart> sharded_part(const at::Tensor& parameter);

}  // namespace muster::parallel
