// SPDX-License-Identifier: BSD-3-Clause
#include "muster/distributed_data_parallel.h"

#include <torch/nn/module.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>

#include "core/base/log/log.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "muster/collectives.h"
#include "muster/init.h"
#include "train/ddp/reducer/reducer.h"
#include "train/ddp/same_modules.h"
#include "train/modules/ddp_logging.h"
#include "train/modules/group_pool.h"
#include "train/modules/mixed_precision.h"
#include "train/modules/module_parts.h"
#include "train/modules/packed_broadcast.h"

namespace muster::parallel {
namespace {

using Named = ModuleParts::Named;

bool is_among(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& each) { return each.is_same(tensor); });
}

[[noreturn]] void refuse(const std::string& text) {
  group::invalid("DistributedDataParallel: " + text);
}

[[noreturn]] void refuse_change(const std::string& what) {
  refuse("the module was changed after it was wrapped: " + what +
         ". Make a new DistributedDataParallel of the changed module, on all ranks");
}

bool has_devices(const DistributedDataParallelOptions& options) {
  return options.device_ids && !options.device_ids->empty();
}

void check_options(const std::vector<Named>& parameters,
                   const DistributedDataParallelOptions& options) {
  if (!(options.bucket_cap_mb > 0)) refuse("bucket_cap_mb must be more than 0");
  if (options.delay_all_reduce_named_params.empty() == options.param_to_hook_all_reduce.defined())
    refuse(
        "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same "
        "time");
  if (options.param_to_hook_all_reduce.defined() &&
      !options.param_to_hook_all_reduce.requires_grad())
    refuse("param_to_hook_all_reduce gets no gradient: it must be a parameter that is trained");
  for (const auto& late : options.delay_all_reduce_named_params) {
    const bool known = std::any_of(parameters.begin(), parameters.end(), [&](const Named& p) {
      return p.tensor.is_same(late.second) && late.second.requires_grad();
    });
    if (!known)
      refuse("'" + late.first +
             "' of delay_all_reduce_named_params is not a parameter of the module that is trained");
  }
  if (options.check_reduction)
    log(LogLevel::warning,
        "DistributedDataParallel: check_reduction is deprecated and has no effect");
  if (options.output_device && !has_devices(options)) refuse("output_device needs device_ids");
  if (!has_devices(options)) return;
  if (options.device_ids->size() > 1)
    refuse("device_ids has " + std::to_string(options.device_ids->size()) +
           " entries; one process drives one device: give one, or none for a module on several "
           "devices");
  const c10::Device device =
      parameters.empty() ? c10::Device(at::kCPU) : parameters.front().tensor.device();
  const std::string what =
      "device_ids is for modules on one device of an accelerator, and this one is on " +
      device.str();
  for (const Named& each : parameters)
    if (each.tensor.device() != device)
      refuse(what + " and " + each.tensor.device().str() + "; leave it out");
  if (device.is_cpu()) refuse(what + "; leave it out for modules on the CPU");
  if (device.index() != options.device_ids->front())
    refuse("device_ids is {" + std::to_string(options.device_ids->front()) +
           "}, and the module is on " + device.str() + "; move the module there first");
}

/// A parameter's properties when the module was wrapped.
struct Wrapped {
  at::Tensor tensor;
  std::vector<std::int64_t> sizes;
  at::ScalarType dtype;
  bool trained;
};

/// The module's properties when it was wrapped.
class WrappedModule {
 public:
  WrappedModule() = default;
  explicit WrappedModule(const ModuleParts& parts)
      : name_(parts.class_name), keeps_alive_(parts.keeps_alive), buffers_now_(parts.buffers_now) {
    for (const Named& each : parts.parameters)
      parameters_.push_back({each.tensor, each.tensor.sizes().vec(), each.tensor.scalar_type(),
                             each.tensor.requires_grad()});
  }

  const std::string& name() const { return name_; }
  void set_module(const torch::nn::Module& module) { module_ = &module; }
  bool is(const torch::nn::Module& module) const { return &module == module_; }
  /// Number of parameters; a shared one counts once per registration.
  std::size_t size() const { return parameters_.size(); }
  /// Updates `buffers` if the module has replaced them.
  void follow_buffers(std::vector<at::Tensor>& buffers) const {
    if (buffers_now_) buffers = buffers_now_();
  }
  /// Throws if the parameters have changed. `low`: they are in low precision now.
  void check_unchanged(const std::vector<at::Tensor>& present,
                       const std::function<std::string(std::size_t)>& name_of, bool low,
                       const DistributedDataParallelOptions& options) const;
  static bool is_frozen(const std::vector<at::Tensor>& parameters) {
    return std::ranges::none_of(parameters,
                                [](const at::Tensor& each) { return each.requires_grad(); });
  }

 private:
  std::string name_;
  const torch::nn::Module* module_ = nullptr;  // null for a module of another language
  std::vector<Wrapped> parameters_;            // in registration order
  std::shared_ptr<const void> keeps_alive_;
  std::function<std::vector<at::Tensor>()> buffers_now_;  // null if they are never replaced
};

void WrappedModule::check_unchanged(const std::vector<at::Tensor>& present,
                                    const std::function<std::string(std::size_t)>& name_of,
                                    bool low, const DistributedDataParallelOptions& options) const {
  if (present.size() < parameters_.size())
    refuse_change("it has lost " + std::to_string(parameters_.size() - present.size()) +
                  " of its parameters");
  if (present.size() > parameters_.size()) {
    for (std::size_t i = 0; i < present.size(); ++i)
      if (std::none_of(parameters_.begin(), parameters_.end(),
                       [&](const Wrapped& each) { return each.tensor.is_same(present[i]); }))
        refuse_change("'" + name_of(i) + "' is new");
    refuse_change("a parameter is registered once more");
  }
  const bool all_frozen = is_frozen(present);
  for (std::size_t i = 0; i < present.size(); ++i) {
    const at::Tensor& tensor = present[i];
    const Wrapped& before = parameters_[i];
    if (!tensor.is_same(before.tensor))
      refuse_change("'" + name_of(i) + "' is another parameter than the one in its place then");
    if (tensor.sizes() != before.sizes) refuse_change("'" + name_of(i) + "' has another shape");
    if (tensor.scalar_type() != before.dtype && !low)
      refuse_change("'" + name_of(i) + "' has another dtype");
    if (tensor.requires_grad() && !before.trained)
      refuse_change("'" + name_of(i) + "' was not trained then, and is now");
    if (!tensor.requires_grad() && before.trained && !all_frozen &&
        (!options.find_unused_parameters || options.static_graph))
      refuse_change("'" + name_of(i) +
                    "' was trained then, and is not now, while others are (find_unused_parameters "
                    "allows that, and so does freezing all)");
  }
}

}  // namespace

struct DataParallelCore::State {
  /// One iteration inside a Join.
  struct Iteration {
    bool syncs = false, reduces = false;
    int last = -1;  // the last rank that has inputs; -1: none
  };

  Group given;
  Group group;                // used by this module only
  std::vector<Group> groups;  // one per reducer; `group` is the first
  std::vector<at::Tensor> parameters, buffers;
  WrappedModule module;
  DistributedDataParallelOptions options;
  bool require_sync = true;
  bool buffers_may_differ = true;
  const Shadow* joined = nullptr;  // set during a Join
  bool frozen = false;             // in the last recording forward, every parameter was frozen
  PackedBroadcast packed;
  std::shared_ptr<LowPrecision> low;
  // The module's own, and that of delayed parameters; one of them may be missing.
  std::vector<std::unique_ptr<Reducer>> reducers;
  bool has_main = false;

  void send_parameters(int group_rank) { packed.send_from(group, group_rank, parameters); }
  void send_buffers(int group_rank);
  void check_unchanged(const std::vector<at::Tensor>& present,
                       const std::function<std::string(std::size_t)>& name_of) {
    module.check_unchanged(present, name_of, low && low->is_low(), options);
    frozen = WrappedModule::is_frozen(present);
  }
  void make_reducers(const std::vector<Named>& all, const BackwardFrame& frame);
  void add_reducer(const std::vector<Named>& of, ReducerOptions reducing);
  void log_block(const std::vector<Named>& all) const;
  bool syncs() const { return at::GradMode::is_enabled() && require_sync; }
  /// Whether the pass that begins now averages gradients; if every parameter is frozen, there are
  /// none.
  bool reduces() const { return syncs() && !frozen; }
  void prepare();
  void refuse_call(const std::exception& why) const;
  void end_calls(const std::exception& why) const;
  Iteration exchange_join_state(const Iteration& mine, bool active);
};

/// The actions of a rank without inputs, instead of forward and backward.
class DataParallelCore::Shadow final : public JoinHook {
 public:
  Shadow(State& state, const JoinOptions& options) : state_(state), options_(options) {}
  ~Shadow() override { leave(); }
  bool divides_by_all() const { return options_.divide_by_initial_world_size; }
  void main_hook() override;
  void post_hook(bool is_last_joiner) override;

 private:
  void leave() {
    if (state_.joined == this) state_.joined = nullptr;
  }
  State& state_;
  const JoinOptions options_;
};

void DataParallelCore::State::add_reducer(const std::vector<Named>& of, ReducerOptions reducing) {
  std::vector<at::Tensor> trained;
  for (const Named& parameter : of) {
    trained.push_back(parameter.tensor);
    reducing.names.push_back(parameter.name);
    reducing.sparse.push_back(parameter.sparse);
  }
  reducing.group = acquire_group(given);
  groups.push_back(reducing.group);
  group = groups.front();
  reducers.push_back(std::make_unique<Reducer>(std::move(trained), std::move(reducing)));
}

void DataParallelCore::State::make_reducers(const std::vector<Named>& all,
                                            const BackwardFrame& frame) {
  std::vector<at::Tensor> wait;
  for (const auto& [name, tensor] : options.delay_all_reduce_named_params) wait.push_back(tensor);
  std::vector<Named> mine, delayed;
  for (const Named& parameter : all)
    if (parameter.tensor.requires_grad())
      (is_among(wait, parameter.tensor) ? delayed : mine).push_back(parameter);
  if (mine.empty() && delayed.empty())
    refuse("there is nothing to average: the module has no parameter that requires a gradient");

  ReducerOptions reducing;
  reducing.model_name = module.name();
  reducing.frame = frame;
  reducing.bucket_cap_bytes =
      static_cast<std::int64_t>(std::ceil(std::ldexp(options.bucket_cap_mb, 20)));
  reducing.first_bucket_bytes = std::min(reducing.first_bucket_bytes, reducing.bucket_cap_bytes);
  reducing.find_unused_parameters = options.find_unused_parameters;
  reducing.gradient_as_bucket_view = options.gradient_as_bucket_view && !options.mixed_precision;
  reducing.static_graph = options.static_graph;
  if (options.mixed_precision) {
    reducing.reduce_dtype = options.mixed_precision->reduce_dtype
                                ? options.mixed_precision->reduce_dtype
                                : options.mixed_precision->param_dtype;
    reducing.on_backward_end = [this] { low->restore(); };
  }
  has_main = !mine.empty();
  if (has_main) add_reducer(mine, reducing);
  if (delayed.empty()) return;
  reducing.bucket_cap_bytes = reducing.first_bucket_bytes = INT64_MAX;
  reducing.gradient_as_bucket_view = !options.mixed_precision;
  reducing.held_until = options.param_to_hook_all_reduce;
  add_reducer(delayed, std::move(reducing));
}

void DataParallelCore::State::log_block(const std::vector<Named>& all) const {
  ConstructionFacts facts;
  facts.module_name = module.name();
  facts.rank = given->rank();
  facts.world_size = given->size();
  facts.backend_name = given->backend();
  facts.broadcast_buffers = options.broadcast_buffers;
  facts.bucket_cap_bytes =
      static_cast<std::int64_t>(std::ceil(std::ldexp(options.bucket_cap_mb, 20)));
  facts.find_unused_parameters = options.find_unused_parameters;
  facts.gradient_as_bucket_view = options.gradient_as_bucket_view;
  if (has_devices(options)) {
    facts.device_ids = options.device_ids;
    facts.output_device = options.output_device;
  }
  for (const Named& parameter : all)
    if (parameter.tensor.requires_grad()) facts.parameters.push_back(parameter.tensor);
  facts.bucket_sizes = reducers.front()->bucket_bytes();
  log_construction(facts);
}

DataParallelCore::DataParallelCore(torch::nn::Module& module,
                                   const DistributedDataParallelOptions& options)
    : DataParallelCore(parts_of(module), options, {}) {
  state_->module.set_module(module);
}

DataParallelCore::DataParallelCore(const ModuleParts& parts,
                                   const DistributedDataParallelOptions& options,
                                   const BackwardFrame& frame)
    : state_(std::make_unique<State>()) {
  State& state = *state_;
  const auto parameters = once_each(parts.parameters);
  const auto buffers = once_each(parts.buffers);
  check_options(parameters, options);
  state.given = options.process_group ? options.process_group : default_group();
  if (!state.given->is_member()) refuse("this rank is not a member of process_group");
  if (options.init_sync)
    compare_modules("DistributedDataParallel", state.given,
                    described(parameters) + described(buffers) + described(options));
  state.options = options;
  if (has_devices(options) && !options.output_device)
    state.options.output_device = options.device_ids->front();
  state.module = WrappedModule(parts);
  for (const Named& each : parameters) state.parameters.push_back(each.tensor);
  for (const Named& each : buffers) state.buffers.push_back(each.tensor);

  state.make_reducers(parameters, frame);
  if (options.init_sync) {
    state.send_parameters(0);
    state.send_buffers(0);
  }
  if (options.mixed_precision)
    state.low =
        std::make_shared<LowPrecision>(state.parameters, state.buffers, *options.mixed_precision);
  state.log_block(parameters);
}

DataParallelCore::~DataParallelCore() {
  const bool over =
      std::ranges::all_of(state_->reducers, [](const auto& reducer) { return reducer->is_idle(); });
  state_->reducers.clear();
  if (!over) return;
  for (const Group& each : state_->groups) release_group(state_->given, each);
}

// ---- each iteration

void DataParallelCore::State::prepare() {
  // Rank 0 may have run out of inputs and have outdated buffers.
  const int source = joined != nullptr
                         ? exchange_join_state({.syncs = syncs(), .reduces = reduces()}, true).last
                         : 0;
  if (syncs()) {
    try {
      for (const auto& reducer : reducers)
        frozen ? reducer->check_finished() : reducer->prepare_forward();
    } catch (const std::exception& error) {
      refuse_call(error);
      throw;
    }
  }
  if (options.broadcast_buffers && buffers_may_differ) send_buffers(source);
}

/// Not seen by autograd: the graph of an earlier forward, whose backward is still to come, may hold
/// the buffers.
void DataParallelCore::State::send_buffers(int group_rank) {
  module.follow_buffers(buffers);
  if (!buffers.empty())
    packed.send_from(group, group_rank, buffers, PackedBroadcast::Autograd::bypass);
}

void DataParallelCore::end_iteration() {
  State& state = *state_;
  try {
    for (const auto& reducer : state.reducers) reducer->check_finished();
  } catch (const std::exception& error) {
    state.refuse_call(error);
    throw;
  }
}

/// Ends the other ranks' wait for this rank's gradients. If all members refuse, each throws its own
/// error.
void DataParallelCore::State::refuse_call(const std::exception& why) const {
  for (const Group& each : groups) {
    if (!each->failure().ok()) continue;
    try {
      core_of(each).refuse(Op::all_reduce, "DistributedDataParallel", why);
    } catch (const DistError&) {
      // The caller rethrows the original error.
    }
  }
}

/// As refuse_call, if the other ranks' next call is unknown: aborts. An earlier failure of a group
/// stays its cause.
void DataParallelCore::State::end_calls(const std::exception& why) const {
  const auto text = [&why](const Group& each) {
    return "on rank " + std::to_string(each->rank()) + ": " + why.what();
  };
  for (const Group& each : groups) core_of(each).end_calls(text(each));
  for (const Group& each : groups) core_of(each).tell_of_abort(text(each));
}

template <class Check>
void DataParallelCore::begin_forward(Check check_unchanged) {
  State& state = *state_;
  if (state.low) state.low->restore_if_over();
  state.frozen = false;
  try {
    if (at::GradMode::is_enabled()) check_unchanged();
  } catch (const std::exception& error) {
    state.end_calls(error);
    throw;
  }
  state.prepare();
  if (state.low && state.low->lower())
    for (const auto& reducer : state.reducers) reducer->reattach_hooks();
}

void DataParallelCore::before_forward(const torch::nn::Module& module) {
  begin_forward([&] {
    if (!state_->module.is(module)) refuse_change("another module stands in its place");
    state_->check_unchanged(parameters_of(module, state_->module.size()), [&](std::size_t index) {
      return module.named_parameters().keys().at(index);
    });
  });
}

void DataParallelCore::before_forward(const std::vector<at::Tensor>& parameters,
                                      const std::function<std::string(std::size_t)>& name_of) {
  begin_forward([&] { state_->check_unchanged(parameters, name_of); });
}

void DataParallelCore::after_forward(const std::vector<at::Tensor>& outputs) {
  State& state = *state_;
  const bool records = at::GradMode::is_enabled();
  // As in torch: buffers are broadcast again after each synchronised pass, not between passes that
  // only accumulate gradients.
  state.buffers_may_differ = state.syncs();
  // A pass with all parameters frozen yields no gradients; the reducers keep expecting the backward
  // of an earlier forward.
  for (const auto& reducer : state.reducers) {
    if (state.reduces()) {
      reducer->prepare_backward(outputs);
    } else if (records && !state.frozen) {
      reducer->skip_backward(outputs);
    }
  }
  if (!state.low) return;
  if (records) state.low->watch(outputs, !state.frozen);
  if (!records || state.frozen) state.low->restore_if_over();
}

bool DataParallelCore::changes_arguments() const {
  return has_devices(state_->options) || state_->low;
}

at::Tensor DataParallelCore::changed(const at::Tensor& argument) const {
  at::Tensor moved = argument;
  if (has_devices(state_->options)) moved = moved.to(state_->parameters.front().device());
  return state_->low ? state_->low->cast(moved) : moved;
}

// ---- uneven inputs

/// Before each iteration inside a Join, after its notice: every rank announces whether it has
/// inputs and what it will do with them.
DataParallelCore::State::Iteration DataParallelCore::State::exchange_join_state(
    const Iteration& mine, bool active) {
  constexpr std::int64_t kActive = 1, kSyncs = 2, kReduces = 4;
  const std::int64_t says =
      (active ? kActive : 0) | (mine.syncs ? kSyncs : 0) | (mine.reduces ? kReduces : 0);
  const auto device = core_of(group).exchange_device();
  auto all = at::zeros({group->size()}, at::TensorOptions(at::kLong).device(device));
  all_gather_into_tensor(all, torch::tensor({says}, at::kLong).to(device), {.group = group});
  all = all.cpu();
  Iteration met;
  int count = 0;
  std::int64_t any = 0, every = kSyncs | kReduces;
  for (int rank = 0; rank < group->size(); ++rank) {
    const std::int64_t theirs = all[rank].item<std::int64_t>();
    if (!(theirs & kActive)) continue;
    met.last = rank;
    ++count;
    any |= theirs;
    every &= theirs;
  }
  if (count != 0 && (any & ~kActive) != every)
    throw DistError(
        "DistributedDataParallel in a Join: some ranks average gradients in this iteration and "
        "others do not, which run it under no_sync, "
        "without gradients, or with all parameters frozen; all must do the same",
        Code::mismatch);
  met.syncs = any & kSyncs;
  met.reduces = any & kReduces;
  const bool by_all = joined == nullptr || joined->divides_by_all();
  for (const auto& reducer : reducers)
    reducer->set_divisor(by_all || count == 0 ? group->size() : count);
  return met;
}

void DataParallelCore::Shadow::main_hook() {
  const at::NoGradGuard no_grad;
  const State::Iteration met = state_.exchange_join_state({}, false);
  if (met.reduces)
    for (const auto& reducer : state_.reducers) reducer->prepare_forward();
  if (state_.options.broadcast_buffers && state_.buffers_may_differ) state_.send_buffers(met.last);
  state_.buffers_may_differ = met.syncs;
  if (!met.reduces) return;
  for (const auto& reducer : state_.reducers) reducer->shadow_backward();
}

void DataParallelCore::Shadow::post_hook(bool is_last_joiner) {
  const int source = state_.exchange_join_state({}, is_last_joiner).last;
  if (source < 0) return;
  state_.send_parameters(source);
  if (state_.options.broadcast_buffers) state_.send_buffers(source);
  for (const auto& reducer : state_.reducers) reducer->set_divisor(state_.group->size());
  leave();
}

std::unique_ptr<JoinHook> DataParallelCore::join_hook(const JoinOptions& options) {
  auto hook = std::make_unique<Shadow>(*state_, options);
  if (options.enable) state_->joined = hook.get();
  return hook;
}

c10::Device DataParallelCore::join_device() const { return state_->parameters.front().device(); }
Group DataParallelCore::join_process_group() const { return state_->given; }

// ---- what users ask for

void DataParallelCore::set_require_sync(bool on) { state_->require_sync = on; }
bool DataParallelCore::require_sync() const { return state_->require_sync; }
bool DataParallelCore::syncs() const { return state_->syncs(); }
void DataParallelCore::register_comm_hook(CommHook hook) {
  if (!state_->has_main)
    refuse("all parameters are delayed, and a communication hook is for those that are not");
  state_->reducers.front()->set_hook(std::move(hook));
}
void DataParallelCore::set_sample_rate(int iterations) {
  state_->reducers.front()->set_sample_rate(iterations);
}
const Group& DataParallelCore::group() const { return state_->group; }
std::optional<int> DataParallelCore::output_device() const { return state_->options.output_device; }
std::vector<std::int64_t> DataParallelCore::bucket_bytes() const {
  return state_->reducers.front()->bucket_bytes();
}
bool DataParallelCore::buckets_rebuilt() const { return state_->reducers.front()->rebuilt(); }

}  // namespace muster::parallel
