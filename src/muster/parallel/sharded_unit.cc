#include "muster/parallel/sharded_unit.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include "muster/base/log.h"
#include "muster/group/errors.h"
#include "muster/group/group_core.h"
#include "muster/init.h"
#include "muster/parallel/end_of_backward.h"
#include "muster/parallel/packed_broadcast.h"
#include "muster/parallel/process_table.h"
#include "muster/parallel/same_modules.h"

namespace muster::parallel {
namespace {

[[noreturn]] void refuse(const std::string& text) {
  group::invalid("FullyShardedDataParallel: " + text);
}

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
    if (!tensor.is_leaf()) refuse("'" + name + "' is no leaf: parameters are");
    if (tensor.layout() != at::kStrided) refuse("'" + name + "' is not strided");
    if (is_sharded(tensor))
      refuse("'" + name +
             "' belongs to another unit already: modules that share a parameter must be in the "
             "same unit");
    if (tensor.device() != parameters.front().tensor.device())
      refuse("'" + name + "' is on " + tensor.device().str() + " and '" + parameters.front().name +
             "' on " + parameters.front().tensor.device().str() +
             ": the parameters of a unit are on one device");
  }
}

std::string described_options(const ShardedUnitOptions& options) {
  const auto dtype = [](const std::optional<at::ScalarType>& type) {
    return std::string(type ? c10::toString(*type) : "as it is");
  };
  return "param_dtype " + dtype(options.mixed_precision.param_dtype) + "\nreduce_dtype " +
         dtype(options.mixed_precision.reduce_dtype) + "\nreshard_after_forward " +
         (options.reshard_after_forward ? "on\n" : "off\n") + "sync_module_states " +
         (options.sync_module_states ? "on\n" : "off\n");
}

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace

bool is_sharded(const at::Tensor& parameter) {
  return sharded_parameters().find(parameter.unsafeGetTensorImpl()).parameters != nullptr;
}

std::optional<ShardedPart> sharded_part(const at::Tensor& parameter) {
  const auto [parameters, index] = sharded_parameters().find(parameter.unsafeGetTensorImpl());
  if (parameters == nullptr) return {};
  if (parameters->is_unsharded())
    refuse("'" + parameters->name(index) +
           "' is whole now, and its shard was asked for: ask between passes, after reshard()");
  return ShardedPart{parameters->sizes_of(index).vec(), parameters->first_of(index)};
}

/// The units on one group's ranks. Their calls use a separate group, so that no other calls come
/// between them.
struct ShardedUnit::Family {
  /// Returns the family and its group, which the units hold. Collective if there is no group yet or
  /// it has failed.
  static std::pair<std::shared_ptr<Family>, Group> of(const Group& given);

  std::weak_ptr<ProcessGroup> group;
  int made = 0;
  std::vector<std::weak_ptr<State>> units;  // in the order of construction, equal on all members
  int in_forward = 0;
};

struct ShardedUnit::State : std::enable_shared_from_this<State> {
  // The pointer type depends on torch's version.
  using NodeRef = std::remove_cvref_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;
  struct Gate;
  /// One forward pass of the unit, referenced by its graph.
  struct Call {
    std::uint64_t begun = 0;  // backward pass in which its part began; 0: none
  };
  using CallRef = std::shared_ptr<Call>;
  /// A forward pass in progress. The gate must not hold the tensors behind it.
  struct Running {
    CallRef call = std::make_shared<Call>();
    // Inputs behind the gate and their versions.
    std::vector<std::pair<at::Tensor, std::int64_t>> given = {};
  };

  State(std::vector<ModuleParts::Named> named, const ShardedUnitOptions& given,
        std::pair<std::shared_ptr<Family>, Group> of)
      : options(given),
        family(std::move(of.first)),
        group(std::move(of.second)),
        parameters(std::move(named), {group, given.mixed_precision.param_dtype,
                                      given.mixed_precision.reduce_dtype, family->made++}) {}

  void put_gate(Running& running, std::vector<at::Tensor>& inputs);
  void hook_outputs(const CallRef& call, std::span<const at::Tensor> outputs);
  void hook_parameters();
  void begin_part(Call& call);
  void end_part(Call& call);
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
  const std::shared_ptr<Family> family;
  const Group group;
  ShardedParameters parameters;
  std::shared_ptr<const void> keeps_alive;

  std::recursive_mutex mutex;
  std::vector<Running> in_forward;  // nested passes, outermost first
  bool was_root = false;            // outermost in the last forward outside of backward
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

/// The node in front of a forward's inputs.
struct ShardedUnit::State::Gate final : torch::autograd::Node {
  Gate(std::shared_ptr<State> state, CallRef call, torch::autograd::edge_list&& next)
      : Node(std::move(next)), state(std::move(state)), call(std::move(call)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    state->end_part(*call);
    return std::move(gradients);
  }
  std::string name() const override { return "ShardedUnitGate"; }
  std::shared_ptr<State> state;
  CallRef call;
};

std::pair<std::shared_ptr<ShardedUnit::Family>, Group> ShardedUnit::Family::of(const Group& given) {
  static std::mutex mutex;
  static std::map<std::weak_ptr<ProcessGroup>, std::shared_ptr<Family>, std::owner_less<>> families;
  {
    const std::lock_guard lock(mutex);
    std::erase_if(families, [](const auto& entry) { return entry.first.expired(); });
    if (const auto found = families.find(given); found != families.end())
      if (const Group group = found->second->group.lock(); group && group->failure().ok())
        return {found->second, group};
  }
  const Group group = new_group({.ranks = given->ranks(),
                                 .timeout = given->timeout(),
                                 .backend = given->backend(),
                                 .use_local_synchronization = true,
                                 .sort_ranks = false});
  const auto family = std::make_shared<Family>();
  family->group = group;
  const std::lock_guard lock(mutex);
  families[given] = family;
  return {family, group};
}

// ---- forward

/// Puts one node in front of all inputs, so that it is reached once.
void ShardedUnit::State::put_gate(Running& running, std::vector<at::Tensor>& inputs) {
  if (!at::GradMode::is_enabled()) return;
  std::vector<at::Tensor*> wanting;
  torch::autograd::edge_list edges;
  for (at::Tensor& input : inputs) {
    if (!input.defined() || !input.requires_grad()) continue;
    wanting.push_back(&input);
    edges.push_back(torch::autograd::impl::gradient_edge(input));
  }
  if (wanting.empty()) return;
  const NodeRef gate(std::unique_ptr<torch::autograd::Node>(
      new Gate(shared_from_this(), running.call, std::move(edges))));
  for (at::Tensor* input : wanting) {
    at::Tensor same = input->detach();
    torch::autograd::create_gradient_edge(same, gate);
    running.given.emplace_back(same, static_cast<std::int64_t>(same._version()));
    *input = same;
  }
}

void ShardedUnit::State::hook_outputs(const CallRef& call, std::span<const at::Tensor> outputs) {
  for (const at::Tensor& output : outputs)
    if (output.defined() && output.requires_grad() && !output.is_leaf())
      output.register_hook(
          [state = shared_from_this(), call](const at::Tensor&) { state->begin_part(*call); });
}

/// Gradients that arrive while the parameter is sharded would not be averaged.
void ShardedUnit::State::hook_parameters() {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].requires_grad()) continue;
    parameters[i].register_hook([weak = weak_from_this(), i](const at::Tensor&) {
      const auto alive = weak.lock();
      if (!alive || (alive->parameters.is_unsharded() && alive->pass.awaits_end)) return;
      const auto check = [&] {
        if (alive->parameters.is_unsharded()) return;
        refuse("the gradient of '" + alive->parameters.name(i) +
               "' came while it was sharded. It was used outside of its unit's forward, or forward "
               "gave its tensors in a type that is not "
               "searched for them");
      };
      // After unshard(), the whole parameter may be used anywhere.
      alive->step_of_backward(check, [&] {
        alive->expect_end_of_pass();
        alive->pass.may_have_gradients = true;
      });
    });
  }
}

// ---- backward

/// `check` throws on every rank alike. If `step` fails, the other ranks wait for this rank, so the
/// group is aborted.
template <class Check, class Step>
void ShardedUnit::State::step_of_backward(Check check, Step step) {
  try {
    const std::lock_guard lock(mutex);
    check_failure();
    check();
    try {
      options.frame.wait_in ? options.frame.wait_in(group, step) : step();
    } catch (...) {
      failure = std::current_exception();
      fail();
      throw;
    }
  } catch (...) {
    if (options.frame.throw_as) options.frame.throw_as();
    throw;
  }
}

void ShardedUnit::State::begin_part(Call& call) {
  const auto check = [this] {
    if (summoned) refuse("backward while the full parameters are summoned: end that first");
    if (at::GradMode::is_enabled())
      refuse(
          "backward(create_graph=true) is not there: whole parameters are gone when a graph of it "
          "would need them");
  };
  step_of_backward(check, [&] {
    expect_end_of_pass();
    if (std::exchange(call.begun, pass.number) != pass.number) ++pass.parts;
    pass.may_have_gradients = true;
    parameters.unshard(/*gather_anew=*/false);
  });
}

/// A pass may end without reaching a gate.
void ShardedUnit::State::expect_end_of_pass() {
  if (std::exchange(pass.awaits_end, true)) return;
  const auto self = shared_from_this();
  at_end_of_backward([self] { self->end_pass(); },
                     [self]() noexcept { self->on_broken_backward(); });
}

void ShardedUnit::State::end_part(Call& call) {
  step_of_backward([] {},
                   [&] {
                     if (std::exchange(call.begun, 0) == pass.number) --pass.parts;
                     if (pass.parts == 0) reduce_if_due();
                   });
}

void ShardedUnit::State::reduce_if_due() {
  if (parameters.is_unsharded()) parameters.collect_gradients(/*will_wait=*/!require_sync);
  if (std::exchange(pass.may_have_gradients, false)) pass.has_unreduced = true;
  if (pass.has_unreduced && require_sync) {
    pass.has_unreduced = false;
    parameters.reduce_gradients();
  }
  parameters.reshard(/*keep_memory=*/false);
}

void ShardedUnit::State::end_pass() {
  step_of_backward([] {},
                   [this] {
                     pass.awaits_end = false;
                     ++pass.number;
                     pass.parts = 0;
                     reduce_if_due();
                     reduce_pending();
                   });
}

/// Reduces gradients owed by units this pass has not reached.
void ShardedUnit::State::reduce_pending() {
  for (const auto& each : family->units) {
    const auto unit = each.lock();
    if (!unit) continue;
    const std::lock_guard lock(unit->mutex);
    if (unit->pass.has_unreduced && unit->require_sync && !unit->pass.awaits_end)
      unit->reduce_if_due();
  }
}

void ShardedUnit::State::on_broken_backward() noexcept {
  const std::lock_guard lock(mutex);
  pass.awaits_end = false;
  if (failure) return;
  failure = std::make_exception_ptr(
      DistError("an exception ended backward in the middle, before all gradients were averaged",
                Code::aborted, {group->rank()}));
  fail();
}

/// Reshards even after a failure, so that the parameters can be inspected.
void ShardedUnit::State::fail() noexcept {
  try {
    parameters.reshard(false);
    core_of(group).abort("a pass of a sharded model failed on rank " +
                         std::to_string(group->rank()) + ": " + why());
  } catch (const std::exception& error) {
    log(LogLevel::warning,
        std::string("the other ranks could not be told that a pass failed here: ") + error.what());
  }
}

std::string ShardedUnit::State::why() const {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of an unknown type";
  }
}

// ---- the unit

ShardedUnit::ShardedUnit(const ModuleParts& parts, const ShardedUnitOptions& options) {
  const Group given = options.group ? options.group : default_group();
  if (!given->is_member()) refuse("this rank is not a member of process_group");
  const auto parameters = once_each(parts.parameters), buffers = once_each(parts.buffers);
  check(parameters);
  compare_modules("FullyShardedDataParallel", given,
                  described(parameters) + described(buffers) + described_options(options));
  const auto family = Family::of(given);
  if (options.sync_module_states) {
    std::vector<at::Tensor> tensors = tensors_of(parameters);
    for (const at::Tensor& each : tensors_of(buffers)) tensors.push_back(each);
    PackedBroadcast().send_from(family.second, 0, tensors);
  }
  state_ = std::make_shared<State>(parameters, options, family);
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
  if (state.summoned) refuse("forward while the full parameters are summoned: end that first");
  state.parameters.unshard(/*gather_anew=*/true);
  // When recomputed in backward for a checkpoint, a unit is called from backward, not from its
  // enclosing unit.
  const bool outermost = state.family->in_forward++ == 0;
  if (!in_backward()) state.was_root = outermost;
  state.in_forward.emplace_back();
  try {
    if (state.options.mixed_precision.cast_forward_inputs ||
        (state.options.cast_root_forward_inputs && state.was_root))
      for (at::Tensor& input : inputs)
        if (input.defined())
          input = cast_floating_point(input, state.options.mixed_precision.param_dtype);
    state.put_gate(state.in_forward.back(), inputs);
  } catch (...) {
    leave_forward();
    throw;
  }
  return inputs;
}

void ShardedUnit::after_forward(std::span<const at::Tensor> outputs) {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  const auto [call, given] = state.in_forward.back();
  try {
    for (const auto& [tensor, version] : given)
      if (static_cast<std::int64_t>(tensor._version()) != version)
        refuse(
            "forward has changed one of its inputs in place, whose gradient would be wrong: change "
            "a copy");
    for (const at::Tensor& output : outputs)
      if (output.defined() && state.parameters.is_in_unsharded(output))
        refuse(
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
  if (!state.in_forward.empty()) return;
  // A checkpoint's forward inside backward: the saved values are needed immediately.
  if (in_backward()) return state.expect_end_of_pass();
  // If no output that requires a gradient is found, the memory is still kept if there may be a
  // graph that is not visible here.
  const bool hidden = !found && (!given.empty() || state.parameters.any_trained());
  state.parameters.reshard(/*keep_memory=*/records &&
                           (hidden || (found && !state.options.reshard_after_forward)));
}

void ShardedUnit::leave_forward() noexcept {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  if (state.in_forward.empty()) return;
  state.in_forward.pop_back();
  --state.family->in_forward;
  if (state.in_forward.empty() && !state.pass.awaits_end) state.parameters.reshard(false);
}

void ShardedUnit::unshard() {
  const std::lock_guard lock(state_->mutex);
  state_->check_failure();
  if (state_->summoned) refuse("unshard while the full parameters are summoned");
  state_->parameters.unshard(true);
}

void ShardedUnit::reshard() {
  const std::lock_guard lock(state_->mutex);
  if (state_->in_forward.empty() && !state_->pass.awaits_end && !state_->summoned)
    state_->parameters.reshard(false);
}

void ShardedUnit::set_require_sync(bool on) { state_->require_sync = on; }
bool ShardedUnit::require_sync() const { return state_->require_sync; }
void ShardedUnit::drop_gradients() {
  const std::lock_guard lock(state_->mutex);
  state_->parameters.drop_gradients();
  state_->pass.has_unreduced = false;
}
ShardedParameters& ShardedUnit::parameters() { return state_->parameters; }
const Group& ShardedUnit::group() const { return state_->group; }

void ShardedUnit::summon() {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  state.check_failure();
  if (!state.in_forward.empty() || state.pass.awaits_end)
    refuse("the full parameters cannot be summoned inside of a forward or backward pass");
  if (state.parameters.is_unsharded() || state.summoned)
    refuse("the parameters are not sharded now: reshard(), or end the summoning before, first");
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
