#include "muster/parallel/sharded_unit.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <map>
#include <mutex>
#include <type_traits>
#include <unordered_set>
#include <utility>

#include "muster/base/log.h"
#include "muster/group/collectives.h"
#include "muster/group/errors.h"
#include "muster/group/init.h"
#include "muster/parallel/packed_broadcast.h"
#include "muster/parallel/same_modules.h"

namespace muster::parallel {
namespace {

[[noreturn]] void refuse(const std::string& text) { group::invalid("FullyShardedDataParallel: " + text); }

/// Of a given group's ranks, for the calls of all units on it: nobody else's come between them. It lives as long as the given one.
Group group_of_units(const Group& given) {
  static std::mutex mutex;
  static std::map<std::weak_ptr<ProcessGroup>, std::weak_ptr<ProcessGroup>, std::owner_less<>> groups;
  {
    const std::lock_guard lock(mutex);
    std::erase_if(groups, [](const auto& entry) { return entry.first.expired(); });
    if (const auto found = groups.find(given); found != groups.end())
      if (Group group = found->second.lock()) return group;
  }
  Group group =
      new_group({.ranks = given->ranks(), .timeout = given->timeout(), .backend = given->backend(), .use_local_synchronization = true});
  const std::lock_guard lock(mutex);
  groups[given] = group;
  return group;
}

/// The parameters of all units of this process.
class Registry {
 public:
  static Registry& of_process() {
    static Registry registry;
    return registry;
  }
  void add(const at::Tensor& parameter) {
    const std::lock_guard lock(mutex_);
    parameters_.insert(parameter.unsafeGetTensorImpl());
  }
  void remove(const at::Tensor& parameter) {
    const std::lock_guard lock(mutex_);
    parameters_.erase(parameter.unsafeGetTensorImpl());
  }
  bool has(const at::Tensor& parameter) const {
    const std::lock_guard lock(mutex_);
    return parameters_.count(parameter.unsafeGetTensorImpl()) != 0;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_set<const void*> parameters_;
};

std::vector<ModuleParts::Named> once_each(const std::vector<ModuleParts::Named>& registered) {
  std::unordered_set<const void*> seen;
  std::vector<ModuleParts::Named> all;
  for (const auto& each : registered)
    if (each.tensor.defined() && seen.insert(each.tensor.unsafeGetTensorImpl()).second) all.push_back(each);
  return all;
}

void check(const std::vector<ModuleParts::Named>& parameters) {
  for (const auto& [name, tensor, sparse] : parameters) {
    if (!tensor.is_leaf()) refuse("'" + name + "' is no leaf: parameters are");
    if (tensor.layout() != at::kStrided) refuse("'" + name + "' is not strided");
    if (is_sharded(tensor))
      refuse("'" + name + "' belongs to another unit already: modules that share a parameter must be in the same unit");
    if (tensor.device() != parameters.front().tensor.device())
      refuse("'" + name + "' is on " + tensor.device().str() + " and '" + parameters.front().name + "' on " +
             parameters.front().tensor.device().str() + ": the parameters of a unit are on one device");
  }
}

std::string described_options(const ShardedUnitOptions& options) {
  const auto dtype = [](const std::optional<at::ScalarType>& type) { return std::string(type ? c10::toString(*type) : "as it is"); };
  return "param_dtype " + dtype(options.mixed_precision.param_dtype) + "\nreduce_dtype " + dtype(options.mixed_precision.reduce_dtype) +
         "\nreshard_after_forward " + (options.reshard_after_forward ? "on\n" : "off\n") + "sync_module_states " +
         (options.sync_module_states ? "on\n" : "off\n");
}

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace

bool is_sharded(const at::Tensor& parameter) { return Registry::of_process().has(parameter); }

struct ShardedUnit::State : std::enable_shared_from_this<State> {
  using NodeRef =
      std::remove_cvref_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;  // which pointer it is depends on torch's version
  struct Gate;
  struct Watch;

  State(std::vector<ModuleParts::Named> named, const ShardedUnitOptions& given, Group units)
      : options(given),
        group(std::move(units)),
        parameters(std::move(named), {group, given.mixed_precision.param_dtype, given.mixed_precision.reduce_dtype}) {}

  std::vector<at::Tensor> behind_gate(std::vector<at::Tensor> inputs);
  void hook_outputs(std::span<const at::Tensor> outputs);
  void hook_parameters();
  void begin_part();
  void end_part();
  void end_pass();
  template <class Check, class Step>
  void step_of_backward(Check check, Step step);
  void expect_end_of_pass();
  void left_in_the_middle() noexcept;
  void fail() noexcept;
  void check_failure() const {
    if (failure) throw DistError("FullyShardedDataParallel: an earlier pass failed, and this model cannot go on: " + why(), Code::aborted);
  }
  std::string why() const;

  const ShardedUnitOptions options;
  const Group group;
  ShardedParameters parameters;
  std::shared_ptr<const void> keeps_alive;
  std::optional<LowPrecision> low;  // of buffers and inputs

  std::recursive_mutex mutex;
  int depth = 0;      // of forward passes
  bool held = false;  // unshard() was called, and reshard() was not
  bool summoned = false;
  bool require_sync = true;
  // Of a backward pass.
  bool awaits_end = false;  // it has come to this unit
  bool has_gradients = false;
  std::exception_ptr failure;
};

/// In front of a forward's inputs.
struct ShardedUnit::State::Gate final : torch::autograd::Node {
  Gate(std::weak_ptr<State> state, torch::autograd::edge_list&& next) : Node(std::move(next)), state(std::move(state)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    if (const auto alive = state.lock()) alive->end_part();
    return std::move(gradients);
  }
  std::string name() const override { return "ShardedUnitGate"; }
  std::weak_ptr<State> state;
};

/// Lives as long as autograd keeps the callback for the end of a backward pass: it is dropped uncalled where an exception ends the pass.
struct ShardedUnit::State::Watch {
  explicit Watch(std::shared_ptr<State> state) : state(std::move(state)) {}
  ~Watch() {
    if (!ended) state->left_in_the_middle();
  }
  std::shared_ptr<State> state;
  bool ended = false;
};

// ---- forward ---------------------------------------------------------------------------------------------------------

/// One node for all of them, so that it is reached once.
std::vector<at::Tensor> ShardedUnit::State::behind_gate(std::vector<at::Tensor> inputs) {
  if (!at::GradMode::is_enabled()) return inputs;
  std::vector<at::Tensor*> wanting;
  torch::autograd::edge_list edges;
  for (at::Tensor& input : inputs) {
    if (!input.defined() || !input.requires_grad()) continue;
    wanting.push_back(&input);
    edges.push_back(torch::autograd::impl::gradient_edge(input));
  }
  if (wanting.empty()) return inputs;
  const NodeRef gate(std::unique_ptr<torch::autograd::Node>(new Gate(weak_from_this(), std::move(edges))));
  for (at::Tensor* input : wanting) {
    at::Tensor same = input->detach();
    torch::autograd::create_gradient_edge(same, gate);
    *input = same;
  }
  return inputs;
}

void ShardedUnit::State::hook_outputs(std::span<const at::Tensor> outputs) {
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad() || output.is_leaf()) continue;
    output.register_hook([weak = weak_from_this()](const at::Tensor&) {
      if (const auto alive = weak.lock()) alive->begin_part();
    });
  }
}

/// What comes while the parameter is sharded would not be averaged.
void ShardedUnit::State::hook_parameters() {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].requires_grad()) continue;
    parameters[i].register_hook([weak = weak_from_this(), i](const at::Tensor&) {
      const auto alive = weak.lock();
      if (!alive || alive->parameters.is_unsharded()) return;
      const auto check = [&] {
        refuse("the gradient of '" + alive->parameters.name(i) +
               "' came while it was sharded. It was used outside of its unit's forward, or " +
               "forward gave its tensors in a type that is not searched for them");
      };
      alive->step_of_backward(check, [] {});
    });
  }
}

// ---- backward --------------------------------------------------------------------------------------------------------

/// What `check` throws, every rank does. Where `step` fails the others wait for this rank's part of what will not come.
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

void ShardedUnit::State::begin_part() {
  const auto check = [this] {
    if (summoned) refuse("backward while the full parameters are summoned: end that first");
    if (at::GradMode::is_enabled())
      refuse("backward(create_graph=true) is not there: whole parameters are gone when a graph of it would need them");
  };
  step_of_backward(check, [this] {
    expect_end_of_pass();
    has_gradients = true;
    parameters.unshard(/*gather_anew=*/false);
  });
}

/// A pass may end without having come to a gate.
void ShardedUnit::State::expect_end_of_pass() {
  if (std::exchange(awaits_end, true)) return;
  torch::autograd::Engine::get_default_engine().queue_callback([watch = std::make_shared<Watch>(shared_from_this())] {
    watch->ended = true;
    watch->state->end_pass();
  });
}

void ShardedUnit::State::end_part() {
  step_of_backward([] {},
                   [this] {
                     if (std::exchange(has_gradients, false) && require_sync) parameters.reduce_gradients();
                     if (!held) parameters.reshard(/*keep_memory=*/false);
                   });
}

void ShardedUnit::State::end_pass() {
  awaits_end = false;
  end_part();
}

void ShardedUnit::State::left_in_the_middle() noexcept {
  const std::lock_guard lock(mutex);
  awaits_end = false;
  if (failure) return;
  failure = std::make_exception_ptr(
      DistError("an exception ended backward in the middle, before all gradients were averaged", Code::aborted, {group->rank()}));
  fail();
}

/// The parameters are to be looked at whatever has happened.
void ShardedUnit::State::fail() noexcept {
  has_gradients = false;
  try {
    parameters.reshard(false);
    group->abort("a pass of a sharded model failed on rank " + std::to_string(group->rank()) + ": " + why());
  } catch (const std::exception& error) {
    log(LogLevel::warning, std::string("the other ranks could not be told that a pass failed here: ") + error.what());
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

// ---- the unit --------------------------------------------------------------------------------------------------------

ShardedUnit::ShardedUnit(const ModuleParts& parts, const ShardedUnitOptions& options) {
  const Group given = options.group ? options.group : default_group();
  if (!given->is_member()) refuse("this rank is not a member of process_group");
  const auto parameters = once_each(parts.parameters);
  check(parameters);
  compare_modules("FullyShardedDataParallel", given, described(parameters) + described_options(options));
  const Group group = group_of_units(given);
  std::vector<at::Tensor> buffers;
  for (const auto& each : once_each(parts.buffers)) buffers.push_back(each.tensor);
  if (options.sync_module_states) {
    std::vector<at::Tensor> tensors;
    for (const auto& each : parameters) tensors.push_back(each.tensor);
    tensors.insert(tensors.end(), buffers.begin(), buffers.end());
    PackedBroadcast().send_from(group, 0, tensors);
  }
  state_ = std::make_shared<State>(parameters, options, group);
  state_->keeps_alive = parts.keeps_alive;
  state_->low.emplace(std::vector<at::Tensor>(), buffers, options.mixed_precision);
  state_->hook_parameters();
  for (const auto& each : parameters) Registry::of_process().add(each.tensor);
}

ShardedUnit::~ShardedUnit() {
  for (std::size_t i = 0; i < state_->parameters.size(); ++i) Registry::of_process().remove(state_->parameters[i]);
}

std::vector<at::Tensor> ShardedUnit::before_forward(std::vector<at::Tensor> inputs) {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  state.check_failure();
  if (state.summoned) refuse("forward while the full parameters are summoned: end that first");
  state.parameters.unshard(/*gather_anew=*/true);
  ++state.depth;
  if (state.options.mixed_precision.cast_forward_inputs)
    for (at::Tensor& input : inputs)
      if (input.defined()) input = state.low->cast(input);
  return state.behind_gate(std::move(inputs));
}

/// Where no output is found that wants a gradient, the memory stays all the same: a graph that cannot be seen from here may need it.
void ShardedUnit::after_forward(std::span<const at::Tensor> outputs) {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  --state.depth;
  const bool records = at::GradMode::is_enabled();
  const bool found = records && std::ranges::any_of(outputs, [](const at::Tensor& each) { return each.defined() && each.requires_grad(); });
  if (found) state.hook_outputs(outputs);
  if (state.depth > 0 || state.held) return;
  // A forward inside of backward, of a checkpoint: what it has saved is needed at once.
  if (in_backward()) return state.expect_end_of_pass();
  state.parameters.reshard(/*keep_memory=*/records && (!found || !state.options.reshard_after_forward));
}

void ShardedUnit::leave_forward() noexcept {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  if (--state.depth == 0 && !state.held && !state.awaits_end) state.parameters.reshard(false);
}

void ShardedUnit::unshard() {
  const std::lock_guard lock(state_->mutex);
  state_->check_failure();
  if (state_->summoned) refuse("unshard while the full parameters are summoned");
  state_->parameters.unshard(true);
  state_->held = true;
}

void ShardedUnit::reshard() {
  const std::lock_guard lock(state_->mutex);
  state_->held = false;
  if (state_->depth == 0 && !state_->awaits_end) state_->parameters.reshard(false);
}

void ShardedUnit::set_require_sync(bool on) { state_->require_sync = on; }
bool ShardedUnit::require_sync() const { return state_->require_sync; }
ShardedParameters& ShardedUnit::parameters() { return state_->parameters; }
const Group& ShardedUnit::group() const { return state_->group; }

void ShardedUnit::summon() {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  state.check_failure();
  if (state.depth > 0 || state.awaits_end) refuse("the full parameters cannot be summoned inside of a forward or backward pass");
  if (state.held || state.summoned) refuse("the parameters are not sharded now: reshard(), or end the summoning before, first");
  state.parameters.lend(state.parameters.full());
  state.summoned = true;
}

void ShardedUnit::end_summon(bool writeback) {
  const std::lock_guard lock(state_->mutex);
  if (std::exchange(state_->summoned, false)) state_->parameters.take_back(writeback);
}

bool ShardedUnit::is_summoned() const { return state_->summoned; }

double clip_grad_norm(const std::vector<ShardedUnit*>& units, double max_norm, double norm_type) {
  if (units.empty()) refuse("clip_grad_norm_ of a model without units");
  if (!(norm_type > 0)) refuse("norm_type must be more than 0");
  const at::NoGradGuard no_grad;
  const bool largest = std::isinf(norm_type);
  double sum = 0;
  std::vector<at::Tensor> gradients;
  for (ShardedUnit* unit : units)
    for (std::size_t i = 0; i < unit->parameters().size(); ++i)
      if (const at::Tensor& gradient = unit->parameters()[i].grad(); gradient.defined() && gradient.numel() > 0)
        gradients.push_back(gradient);
  for (const at::Tensor& gradient : gradients) {
    const double norm = at::linalg_vector_norm(gradient.to(at::kFloat), norm_type).item<double>();
    sum = largest ? std::max(sum, norm) : sum + std::pow(norm, norm_type);
  }
  const at::Tensor all = at::full({1}, sum, at::kDouble);
  all_reduce(all, {.op = largest ? ReduceOp::MAX : ReduceOp::SUM, .group = units.front()->group()});
  const double total = largest ? all.item<double>() : std::pow(all.item<double>(), 1 / norm_type);
  if (const double factor = max_norm / (total + 1e-6); factor < 1)
    for (const at::Tensor& gradient : gradients) gradient.mul_(factor);
  return total;
}

}  // namespace muster::parallel
