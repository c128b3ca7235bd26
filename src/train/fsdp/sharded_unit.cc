// SPDX-License-Identifier: BSD-3-Clause
#include "train/fsdp/sharded_unit.h"

#include <torch/types.h>
#include <algorithm>
#include <exception>
#include <mutex>
#include <utility>

#include "core/group/errors.h"
#include "muster/device_mesh.h"
#include "muster/init.h"
#include "train/ddp/same_modules.h"
#include "train/fsdp/sharded_norm.h"
#include "train/fsdp/sharded_unit_state.h"
#include "train/modules/packed_broadcast.h"
#include "train/modules/process_table.h"

namespace muster::parallel {
const char* name_of(ShardedEvent event) {
  switch (event) {
    case ShardedEvent::gather_started: return "gather_started";
    case ShardedEvent::gather_finished: return "gather_finished";
    case ShardedEvent::forward_began: return "forward_began";
    case ShardedEvent::forward_ended: return "forward_ended";
    case ShardedEvent::backward_began: return "backward_began";
    case ShardedEvent::backward_ended: return "backward_ended";
    case ShardedEvent::reduced: return "reduced";
  }
  return "unknown";
}

namespace {

/// A parameter's place in its unit.
struct PlaceInUnit {
  const ShardedParameters* parameters = nullptr;
  std::size_t index = 0;
};
ProcessTable<PlaceInUnit>& sharded_parameters() {
  static ProcessTable<PlaceInUnit> table;
  return table;
}

std::vector<at::Tensor> tensors_of(const std::vector<ModuleParts::Named>& named) {
  std::vector<at::Tensor> tensors;
  for (const auto& each : named) tensors.push_back(each.tensor);
  return tensors;
}

void check(const std::vector<ModuleParts::Named>& parameters) {
  for (const auto& [name, tensor, sparse] : parameters) {
    if (!tensor.is_leaf()) refuse_unit("'" + name + "' is no leaf: parameters are");
    if (tensor.layout() != at::kStrided) refuse_unit("'" + name + "' is not strided");
    if (is_sharded(tensor))
      refuse_unit(
          "'" + name +
          "' belongs to another unit already: modules that share a parameter must be in the "
          "same unit");
    if (tensor.device() != parameters.front().tensor.device())
      refuse_unit("'" + name + "' is on " + tensor.device().str() + " and '" +
                  parameters.front().name + "' on " + parameters.front().tensor.device().str() +
                  ": the parameters of a unit are on one device");
  }
}

/// The dimension of each of `parameters` that is to be divided, from those given for
/// `registered`, which may have a parameter twice.
std::vector<std::int64_t> shard_dims_of(const std::vector<ModuleParts::Named>& parameters,
                                        const std::vector<ModuleParts::Named>& registered,
                                        const std::vector<std::int64_t>& given) {
  if (given.size() != registered.size())
    refuse_unit("shard_dims has " + std::to_string(given.size()) + " entries for " +
                std::to_string(registered.size()) + " parameters: give each its dimension");
  std::vector<std::int64_t> dims;
  for (const ModuleParts::Named& parameter : parameters) {
    const std::string& name = parameter.name;
    const at::Tensor& tensor = parameter.tensor;
    const auto found = std::ranges::find_if(
        registered, [&](const auto& each) { return each.tensor.is_same(tensor); });
    const std::int64_t dim = given[static_cast<std::size_t>(found - registered.begin())];
    if (tensor.dim() == 0)
      refuse_unit("'" + name +
                  "' is a scalar, which has no dimension to divide: make it a tensor of one "
                  "dimension with one element, or leave it out by ignored_states");
    if (dim < -tensor.dim() || dim >= tensor.dim())
      refuse_unit("'" + name + "' has " + std::to_string(tensor.dim()) +
                  " dimensions, and is to be divided along dimension " + std::to_string(dim));
    dims.push_back(dim < 0 ? dim + tensor.dim() : dim);
  }
  return dims;
}

std::string described_division(const ShardedUnitOptions& options,
                               const std::vector<ModuleParts::Named>& parameters) {
  std::string all = "divided flat";
  if (options.shard_dims) all = "divided along dimensions";
  for (const std::int64_t dim : options.shard_dims.value_or(std::vector<std::int64_t>()))
    all.append(" ").append(std::to_string(dim));
  const auto without_values =
      std::ranges::count_if(parameters, [](const auto& each) { return each.tensor.is_meta(); });
  return all + "\n" + std::to_string(without_values) + " parameters on the meta device\n";
}

std::string described_options(const ShardedUnitOptions& options) {
  const auto dtype = [](const std::optional<at::ScalarType>& type) {
    return std::string(type ? c10::toString(*type) : "as it is");
  };
  return "param_dtype " + dtype(options.mixed_precision.param_dtype) + "\nreduce_dtype " +
         dtype(options.mixed_precision.reduce_dtype) + "\nreshard_after_forward " +
         (options.after_forward == Keep::nothing ? "on"
          : options.after_forward == Keep::all   ? "off"
                                                 : std::to_string(options.part_ranks) + " ranks") +
         (options.shards ? "\nsharded" : "\nnot sharded") + "\nprefetch " +
         std::to_string(options.backward_prefetch ? static_cast<int>(*options.backward_prefetch)
                                                  : -1) +
         (options.forward_prefetch ? " forward" : "") + "\ncompression of gradients " +
         std::to_string(static_cast<int>(options.gradient_compression)) + ", of parameters " +
         std::to_string(static_cast<int>(options.parameter_compression)) + "\nsync_module_states " +
         (options.sync_module_states ? "on\n" : "off\n");
}

/// The first parameter that is a part of tensor parallelism with others on ranks of the unit's
/// groups; empty: none.
std::string part_among_copies(const std::vector<ModuleParts::Named>& parameters, const Group& given,
                              const Group& replicas) {
  for (const auto& each : parameters)
    if (const auto part = tensor_parallel_part(each.tensor))
      if (share_ranks(part->group, given) || share_ranks(part->group, replicas)) return each.name;
  return "";
}

/// compare_modules() over one or two groups, either of which may be null. A difference within one
/// shows in the other, so that it throws on all ranks of both.
void compare_with_all(const Group& shards, const Group& replicas, std::string mine) {
  std::exception_ptr first;
  if (shards) {
    try {
      compare_modules("FullyShardedDataParallel", shards, mine);
    } catch (const DistError& error) {
      if (!replicas || error.code() != Code::mismatch) throw;
      first = std::current_exception();
      mine = std::string(error.what()) + "\n" + mine;
    }
  }
  if (replicas) compare_modules("FullyShardedDataParallel", replicas, mine);
  if (first) std::rethrow_exception(first);
}

}  // namespace

void refuse_unit(const std::string& text) { group::invalid("FullyShardedDataParallel: " + text); }

bool is_sharded(const at::Tensor& parameter) {
  return sharded_parameters().find(parameter.unsafeGetTensorImpl()).parameters != nullptr;
}

std::optional<ShardedPart> sharded_part(const at::Tensor& parameter) {
  const auto [parameters, index] = sharded_parameters().find(parameter.unsafeGetTensorImpl());
  if (parameters == nullptr) return {};
  if (parameters->is_unsharded())
    refuse_unit("'" + parameters->name(index) +
                "' is whole now, and its shard was asked for: ask between passes, after reshard()");
  ShardedPart part{.sizes = parameters->sizes_of(index).vec(),
                   .group = parameters->group(),
                   .replicas = parameters->replicas()};
  if (const auto rows = parameters->rows_of(index)) {
    part.offsets.emplace(part.sizes.size(), 0);
    (*part.offsets)[static_cast<std::size_t>(rows->dim)] = rows->first;
    part.dim = rows->dim;
  } else {
    part.first = parameters->first_of(index);
  }
  return part;
}

ShardedUnit::ShardedUnit(const ModuleParts& parts, const ShardedUnitOptions& given_options) {
  ShardedUnitOptions options = given_options;
  const Group given = options.group ? options.group : default_group();
  if (!given->is_member()) refuse_unit("this rank is not a member of process_group");
  const auto parameters = once_each(parts.parameters), buffers = once_each(parts.buffers);
  check(parameters);
  if (options.shard_dims)
    options.shard_dims = shard_dims_of(parameters, parts.parameters, *options.shard_dims);
  if (!options.shards && options.replicas)
    refuse_unit("NO_SHARD has no second group: all ranks of process_group hold the same");
  const Group copies = options.shards ? options.replicas : given;
  const std::string part_name = part_among_copies(parameters, given, copies);
  const std::string mine = described(parameters) + described(buffers) + described_options(options) +
                           described_division(options, parameters) +
                           "parts of tensor parallelism among the unit's ranks: " + part_name +
                           "\n";
  compare_with_all(options.shards ? given : nullptr, copies, mine);
  if (!part_name.empty()) refuse_parts_as_copies(part_name);
  const auto family = Family::of(options.shards ? given : Family::alone(given));
  const Group replicas = copies ? Family::of(copies).second : nullptr;
  if (options.sync_module_states) {
    std::vector<at::Tensor> tensors = tensors_of(parameters);
    for (const at::Tensor& each : tensors_of(buffers)) tensors.push_back(each);
    std::erase_if(tensors, [](const at::Tensor& each) { return each.is_meta(); });
    if (replicas) PackedBroadcast().send_from(replicas, 0, tensors);
    if (options.shards) PackedBroadcast().send_from(family.second, 0, tensors);
  }
  const Group part =
      options.after_forward == Keep::part ? family.first->part(options.part_ranks) : nullptr;
  const std::string name = parts.class_name + " " + std::to_string(family.first->made);
  state_ = std::make_shared<State>(parameters, options, family, replicas, name);
  state_->part = part;
  state_->parameters.set_part(part);
  state_->parameters.communication().gradient_compression = options.gradient_compression;
  state_->parameters.communication().parameter_compression = options.parameter_compression;
  state_->keeps_alive = parts.keeps_alive;
  cast_in_place(tensors_of(buffers), options.mixed_precision.buffer_dtype);
  state_->hook_parameters();
  auto& siblings = family.first->units;
  std::erase_if(siblings, [](const auto& each) { return each.expired(); });
  siblings.push_back(state_);
  for (std::size_t i = 0; i < state_->parameters.size(); ++i)
    sharded_parameters().put(state_->parameters[i].unsafeGetTensorImpl(), {&state_->parameters, i});
}

ShardedUnit::~ShardedUnit() {
  for (std::size_t i = 0; i < state_->parameters.size(); ++i)
    sharded_parameters().remove(state_->parameters[i].unsafeGetTensorImpl());
}

std::vector<at::Tensor> ShardedUnit::before_forward(std::vector<at::Tensor> inputs) {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  state.check_failure();
  if (state.summoned) refuse_unit("forward while the full parameters are summoned: end that first");
  // When recomputed in backward for a checkpoint, a unit is called from backward, not from its
  // enclosing unit.
  const bool outermost = state.family->in_forward == 0, recomputes = is_in_backward();
  if (outermost && !recomputes) state.family->begin_pass();
  state.is_prefetched = false;
  state.parameters.unshard(state.keep_after_backward ? Gather::if_changed : Gather::anew);
  ++state.family->in_forward;
  if (!recomputes) state.was_root = outermost;
  state.in_forward.emplace_back();
  try {
    if (state.options.mixed_precision.cast_forward_inputs ||
        (state.options.cast_root_forward_inputs && state.was_root))
      for (at::Tensor& input : inputs)
        if (input.defined())
          input = cast_floating_point(input, state.options.mixed_precision.param_dtype);
    state.put_gate(state.in_forward.back(), inputs);
    if (!recomputes) state.prefetch_forward();
  } catch (...) {
    leave_forward();
    throw;
  }
  state.record(ShardedEvent::forward_began);
  return inputs;
}

void ShardedUnit::after_forward(std::span<const at::Tensor> outputs) {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  const auto [call, given] = state.in_forward.back();
  try {
    for (const auto& [tensor, version] : given)
      if (static_cast<std::int64_t>(tensor._version()) != version)
        refuse_unit(
            "forward has changed one of its inputs in place, whose gradient would be wrong: change "
            "a copy");
    for (const at::Tensor& output : outputs)
      if (output.defined() && state.parameters.is_in_unsharded(output))
        refuse_unit(
            "forward returns a parameter or a view of one, whose memory is given back now: return "
            "a copy (clone())");
  } catch (...) {
    leave_forward();
    throw;
  }
  state.in_forward.pop_back();
  --state.family->in_forward;
  const bool records = at::GradMode::is_enabled();
  const bool found = records && std::ranges::any_of(outputs, [](const at::Tensor& each) {
                       return each.defined() && each.requires_grad();
                     });
  if (found) state.hook_outputs(call, outputs);
  state.record(ShardedEvent::forward_ended);
  if (!state.in_forward.empty()) return;
  // A checkpoint's forward inside backward: the saved values are needed immediately.
  if (is_in_backward()) return state.expect_end_of_pass();
  if (found) {
    state.ended_at = state.family->ended.size();
    state.family->ended.push_back(state_);
  }
  // If no output that requires a gradient is found, the memory is still kept if there may be a
  // graph that is not visible here.
  const bool hidden = !found && (!given.empty() || state.parameters.any_trained());
  state.parameters.reshard(!records || (!hidden && !found) ? Keep::nothing
                           : hidden                        ? Keep::all
                                                           : state.after_forward);
  if (state.family->in_forward == 0) state.family->drop_prefetched();
}

void ShardedUnit::leave_forward() noexcept {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  if (state.in_forward.empty()) return;
  state.in_forward.pop_back();
  --state.family->in_forward;
  if (state.in_forward.empty() && !state.pass.awaits_end) state.parameters.reshard(Keep::nothing);
}

void ShardedUnit::unshard() {
  const std::lock_guard lock(state_->mutex);
  state_->check_failure();
  if (state_->summoned) refuse_unit("unshard while the full parameters are summoned");
  state_->is_prefetched = false;
  state_->parameters.unshard(Gather::anew);
}

void ShardedUnit::start_unshard() {
  const std::lock_guard lock(state_->mutex);
  state_->check_failure();
  if (state_->summoned) refuse_unit("unshard while the full parameters are summoned");
  state_->is_prefetched = false;
  state_->record(ShardedEvent::gather_started);
  state_->parameters.start_gather();
}

void ShardedUnit::reshard() {
  const std::lock_guard lock(state_->mutex);
  if (state_->in_forward.empty() && !state_->pass.awaits_end && !state_->summoned)
    state_->parameters.reshard(Keep::nothing);
}
bool ShardedUnit::is_unsharded() const { return state_->parameters.is_unsharded(); }

void ShardedUnit::reduce_now() {
  const std::lock_guard lock(state_->mutex);
  state_->check_failure();
  if (!std::exchange(state_->pass.has_unreduced, false)) return;
  state_->parameters.start_reduction();
  state_->parameters.finish_reduction();
}

void ShardedUnit::reset() {
  const std::lock_guard lock(state_->mutex);
  for (; !state_->in_forward.empty(); state_->in_forward.pop_back()) --state_->family->in_forward;
  state_->check_failure();
  state_->is_prefetched = false;
  state_->parameters.drop_gradients();
  state_->pass.has_unreduced = false;
  state_->parameters.reshard(Keep::nothing);
}

void ShardedUnit::set_after_forward(Keep keep) { state_->after_forward = keep; }
void ShardedUnit::set_keep_after_backward(bool on) { state_->keep_after_backward = on; }
void ShardedUnit::set_unshard_in_backward(bool on) { state_->unshard_in_backward = on; }
void ShardedUnit::set_forward_prefetch(const std::optional<std::vector<ShardedUnit*>>& units) {
  state_->forward_list = State::weakly(units);
}
void ShardedUnit::set_backward_prefetch(const std::optional<std::vector<ShardedUnit*>>& units) {
  state_->backward_list = State::weakly(units);
}

void ShardedUnit::set_require_sync(bool on) { state_->require_sync = on; }
bool ShardedUnit::require_sync() const { return state_->require_sync; }
void ShardedUnit::drop_gradients() {
  const std::lock_guard lock(state_->mutex);
  state_->parameters.drop_gradients();
  state_->pass.has_unreduced = false;
}
ShardedParameters& ShardedUnit::parameters() { return state_->parameters; }
const ShardedParameters& ShardedUnit::parameters() const { return state_->parameters; }
const Group& ShardedUnit::group() const { return state_->group; }
const Group& ShardedUnit::replicas() const { return state_->replicas; }
bool ShardedUnit::was_root() const { return state_->was_root; }
bool ShardedUnit::is_first() const {
  return state_->group->rank() == 0 && (!state_->replicas || state_->replicas->rank() == 0);
}

void ShardedUnit::summon() {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  state.check_failure();
  if (!state.in_forward.empty() || state.pass.awaits_end)
    refuse_unit("the full parameters cannot be summoned inside of a forward or backward pass");
  if (state.parameters.is_unsharded() || state.summoned)
    refuse_unit(
        "the parameters are not sharded now: reshard(), or end the summoning before, first");
  state.parameters.show_full(state.parameters.full());
  state.summoned = true;
}

void ShardedUnit::end_summon(bool writeback) {
  const std::lock_guard lock(state_->mutex);
  if (!state_->summoned) return;
  state_->summoned = false;
  state_->parameters.end_show_full(writeback);
}

bool ShardedUnit::is_summoned() const { return state_->summoned; }

}  // namespace muster::parallel
