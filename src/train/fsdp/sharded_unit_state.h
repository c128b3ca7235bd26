// SPDX-License-Identifier: BSD-3-Clause
/// The state of a unit, and that of the units of its group; for the files of ShardedUnit alone.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/types.h>

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/group/errors.h"
#include "train/fsdp/sharded_unit.h"

namespace muster::parallel {

[[noreturn]] void refuse_unit(const std::string& text);

inline bool is_in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

/// The units on one group's ranks. Their calls use a separate group, so that no other calls come
/// between them.
struct ShardedUnit::Family {
  /// Returns the family and its group, which the units hold. Collective if there is no group yet or
  /// it has failed.
  static std::pair<std::shared_ptr<Family>, Group> of(const Group& given);

  /// The single-rank group of this rank of `given`.
  static Group alone(const Group& given);
  /// Collective where there is none yet: this rank's group of `size` consecutive ranks.
  Group part(int size);
  void begin_pass();
  void drop_prefetched();
  /// Waits for the reduction under way, if any.
  void finish_reduction();

  std::weak_ptr<ProcessGroup> group;
  int made = 0;
  std::vector<std::weak_ptr<State>> units;  // in the order of construction, equal on all members
  int in_forward = 0;
  int in_backward = 0;  // units that a pass has reached and that has not ended
  std::map<int, std::weak_ptr<ProcessGroup>> parts;
  // Units in the order in which forward began (of this pass and of the one before) and in which it
  // ended.
  std::vector<std::weak_ptr<State>> began, began_before, ended;
  // The unit whose gradients are being reduced while the next one computes: one at a time, for the
  // memory that it takes.
  std::weak_ptr<State> reducing;
  const std::shared_ptr<ShardedMeter> meter = std::make_shared<ShardedMeter>();
};

struct ShardedUnit::State : std::enable_shared_from_this<State> {
  // The pointer type depends on torch's version.
  using NodeRef = std::remove_cvref_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;
  struct Gate;
  /// One forward pass of the unit, referenced by its graph.
  struct UnitPass {
    std::uint64_t begun = 0;  // backward pass in which its part began; 0: none
  };
  using CallRef = std::shared_ptr<UnitPass>;
  /// A forward pass in progress. The gate must not hold the tensors behind it.
  struct Running {
    CallRef call = std::make_shared<UnitPass>();
    // Inputs behind the gate and their versions.
    std::vector<std::pair<at::Tensor, std::int64_t>> given = {};
  };

  State(std::vector<ModuleParts::Named> named, const ShardedUnitOptions& given,
        std::pair<std::shared_ptr<Family>, Group> of, Group replicas, std::string name)
      : options(given),
        name(std::move(name)),
        family(std::move(of.first)),
        group(std::move(of.second)),
        replicas(std::move(replicas)),
        parameters(std::move(named), sharding_options()),
        after_forward(given.after_forward) {}
  ShardingOptions sharding_options() const {
    return {.group = group,
            .param_dtype = options.mixed_precision.param_dtype,
            .reduce_dtype = options.mixed_precision.reduce_dtype,
            .reduce_in_own_dtype = options.reduce_in_own_dtype,
            .number = family->made++,
            .replicas = replicas,
            .device = options.device,
            .offload = options.cpu_offload,
            .pin_memory = options.pin_memory,
            .meter = family->meter,
            .shard_dims = options.shard_dims};
  }

  using Units = std::vector<std::weak_ptr<State>>;
  static std::optional<Units> weakly(const std::optional<std::vector<ShardedUnit*>>& units) {
    if (!units) return {};
    Units all;
    for (const ShardedUnit* unit : *units) all.push_back(unit->state_);
    return all;
  }
  void record(ShardedEvent event) const {
    if (options.timeline) options.timeline->add(name, event);
  }
  void prefetch(const Units& units, bool is_hint);
  void prefetch_forward();
  void prefetch_backward();
  void end_of_part();
  void put_gate(Running& running, std::vector<at::Tensor>& inputs);
  void hook_outputs(const CallRef& call, std::span<const at::Tensor> outputs);
  void hook_parameters();
  void begin_part(UnitPass& call);
  void end_part(UnitPass& call);
  void end_pass();
  void reduce_if_due();
  void reduce_pending();
  template <class Check, class Step>
  void step_of_backward(Check check, Step step);
  void expect_end_of_pass();
  void on_broken_backward() noexcept;
  void fail() noexcept;
  void check_failure() const {
    if (failure)
      throw DistError(
          "FullyShardedDataParallel: an earlier pass failed, and this model cannot go on: " + why(),
          Code::aborted);
  }
  std::string why() const;

  const ShardedUnitOptions options;
  const std::string name;
  const std::shared_ptr<Family> family;
  const Group group, replicas;
  Group part;
  ShardedParameters parameters;
  Keep after_forward;
  bool keep_after_backward = false, unshard_in_backward = true;
  std::optional<Units> forward_list, backward_list;
  bool is_prefetched = false;                // by a hint, and not used yet
  std::optional<std::size_t> ended_at = {};  // in family->ended
  std::shared_ptr<const void> keeps_alive;

  // Held in each step of a pass; options are set between passes. Recursive, because a step of one
  // unit goes through all units of the family, itself among them, and a checkpoint runs forward
  // inside backward.
  std::recursive_mutex mutex;
  std::vector<Running> in_forward;  // nested passes, outermost first
  bool was_root = true;             // outermost in the last forward outside of backward
  bool summoned = false;
  bool require_sync = true;
  /// The backward pass that has reached this unit.
  struct {
    bool awaits_end = false;
    std::uint64_t number = 1;
    int parts = 0;  // calls whose part of the pass has begun but not ended
    bool may_have_gradients = false;
    bool has_unreduced = false;  // gradients arrived and were not reduced
  } pass;
  std::exception_ptr failure;
};

}  // namespace muster::parallel
