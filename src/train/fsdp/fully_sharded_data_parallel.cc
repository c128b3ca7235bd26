// SPDX-License-Identifier: BSD-3-Clause
#include "muster/fully_sharded_data_parallel.h"

#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <algorithm>
#include <limits>
#include <map>
#include <span>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "core/base/log/log.h"
#include "core/group/errors.h"
#include "muster/init.h"
#include "train/fsdp/sharded_norm.h"
#include "train/fsdp/sharded_parameters.h"
#include "train/fsdp/sharded_unit.h"
#include "train/fsdp/shared_pass.h"
#include "train/modules/module_parts.h"
#include "train/modules/process_table.h"

namespace muster {
namespace parallel {
namespace {

[[noreturn]] void refuse_sharding(const std::string& text) {
  group::invalid("FullyShardedDataParallel: " + text);
}

/// The units of modules of this process.
ProcessTable<ShardedUnit*>& units_of_modules() {
  static ProcessTable<ShardedUnit*> table;
  return table;
}
ShardedUnit* unit_of(const torch::nn::Module& module) { return units_of_modules().find(&module); }

std::string joined(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

/// Tensors, by address, that the options say to leave alone.
using Ignored = std::unordered_set<const void*>;
Ignored ignored_by(const FullyShardedDataParallelOptions& options) {
  Ignored all;
  const auto add = [&all](const at::Tensor& tensor) { all.insert(tensor.unsafeGetTensorImpl()); };
  for (const at::Tensor& tensor : options.ignored_states) add(tensor);
  for (const auto& module : options.ignored_modules) {
    for (const at::Tensor& tensor : module->parameters()) add(tensor);
    for (const at::Tensor& tensor : module->buffers()) add(tensor);
  }
  return all;
}

/// Calls `visit(module, path)` for `module` and the modules inside that are in no inner unit.
template <class Visit>
void visit_own(torch::nn::Module& module, const std::string& path, const Visit& visit) {
  visit(module, path);
  for (const auto& child : module.named_children())
    if (unit_of(*child.value()) == nullptr)
      visit_own(*child.value(), joined(path, child.key()), visit);
}

/// The parameters and buffers of `module` that are in no inner unit, by name.
ModuleParts own_parts(torch::nn::Module& module, const Ignored& ignored) {
  ModuleParts parts{.class_name = module.name(),
                    .parameters = {},
                    .buffers = {},
                    .keeps_alive = module.weak_from_this().lock()};
  const auto add = [&ignored](const auto& items, const std::string& path,
                              std::vector<ModuleParts::Named>& to) {
    for (const auto& item : items)
      if (!ignored.contains(item.value().unsafeGetTensorImpl()))
        to.push_back({joined(path, item.key()), item.value()});
  };
  visit_own(module, "", [&](const torch::nn::Module& part, const std::string& path) {
    add(part.named_parameters(/*recurse=*/false), path, parts.parameters);
    add(part.named_buffers(/*recurse=*/false), path, parts.buffers);
  });
  return parts;
}

/// Gives memory to a buffer, and values that show it if nobody sets others.
void materialize_unset(const at::Tensor& buffer, const FullyShardedDataParallelOptions& options) {
  materialize(buffer, options.device.value_or(at::kCPU));
  if (buffer.is_floating_point() || buffer.is_complex())
    buffer.fill_(std::numeric_limits<double>::quiet_NaN());
  else
    buffer.zero_();
}

/// Gives memory and values to what is on the meta device in `module` and in no inner unit; without
/// param_init_fn to buffers alone, because the unit gives the parameters' shards theirs.
void materialize_own(torch::nn::Module& module, const FullyShardedDataParallelOptions& options,
                     const Ignored& ignored) {
  const at::NoGradGuard no_grad;
  const auto lacks_memory = [&ignored](const at::Tensor& tensor) {
    return tensor.is_meta() && !ignored.contains(tensor.unsafeGetTensorImpl());
  };
  visit_own(module, "", [&](torch::nn::Module& part, const std::string&) {
    bool any = false;
    for (const at::Tensor& buffer : part.buffers(/*recurse=*/false)) {
      if (!lacks_memory(buffer)) continue;
      materialize_unset(buffer, options);
      any = true;
    }
    if (!options.param_init_fn) return;
    for (const at::Tensor& parameter : part.parameters(/*recurse=*/false)) {
      if (!lacks_memory(parameter)) continue;
      materialize(parameter, options.device.value_or(at::kCPU));
      any = true;
    }
    if (any) options.param_init_fn(part);
  });
}

std::int64_t parameters_without_unit(const torch::nn::Module& module, const Ignored& ignored) {
  std::int64_t elements = 0;
  for (const at::Tensor& parameter : module.parameters())
    if (!is_sharded(parameter) && !ignored.contains(parameter.unsafeGetTensorImpl()))
      elements += parameter.numel();
  return elements;
}

/// Replaces an element of a Sequential by the element with its own unit. It is registered as
/// before, so names are unchanged.
struct ShardedElement : torch::nn::Module {
  ShardedElement(torch::nn::AnyModule element, const FullyShardedDataParallelOptions& options)
      : element(std::move(element)), core(*this->element.ptr(), options) {}
  at::Tensor forward(at::Tensor input) {
    return through_unit(
        core, [this](at::Tensor each) -> at::Tensor { return element.forward(std::move(each)); },
        std::move(input));
  }
  std::shared_ptr<Module> clone(const std::optional<at::Device>&) const override {
    refuse_sharding(
        "a Sequential of which elements are sharded is not cloned: clone it before, or load its "
        "state_dict() into another");
  }
  torch::nn::AnyModule element;
  ShardedCore core;
};

/// Makes units of the modules that the policy selects, inner ones first. A module in several places
/// is one unit.
void wrap_inside(torch::nn::Module& module, const FullyShardedDataParallelOptions& options,
                 const Ignored& ignored,
                 std::unordered_map<const torch::nn::Module*, torch::nn::AnyModule>& wrapped) {
  if (unit_of(module) != nullptr) return;
  FullyShardedDataParallelOptions inner = options;
  inner.auto_wrap_policy = {};
  const auto is_chosen = [&](const torch::nn::Module& part) {
    const std::int64_t elements = parameters_without_unit(part, ignored);
    return unit_of(part) == nullptr && elements > 0 && options.auto_wrap_policy(part, elements);
  };
  for (const auto& child : module.children()) {
    wrap_inside(*child, options, ignored, wrapped);
    auto* const marked = dynamic_cast<ShardableModule*>(child.get());
    if (marked != nullptr && is_chosen(*child))
      marked->core = std::make_shared<ShardedCore>(*child, inner);
  }
  auto* sequential = module.as<torch::nn::SequentialImpl>();
  if (sequential == nullptr) return;
  for (torch::nn::AnyModule& element : *sequential) {
    const auto part = element.ptr();
    if (part->as<ShardedElement>() == nullptr && is_chosen(*part))
      wrapped.emplace(part.get(), std::make_shared<ShardedElement>(element, inner));
    if (const auto found = wrapped.find(part.get()); found != wrapped.end())
      element = found->second;
  }
}

bool is_hybrid(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::HYBRID_SHARD ||
         strategy == ShardingStrategy::HYBRID_SHARD_ZERO2;
}

/// The groups that share and that replicate the shards.
std::pair<Group, Group> groups_of(const FullyShardedDataParallelOptions& options) {
  const bool hybrid = is_hybrid(options.sharding_strategy);
  if (const auto& mesh = options.device_mesh) {
    if (options.process_group || options.replicate_group)
      refuse_sharding("give groups or a mesh, not both");
    if (mesh->ndim() != (hybrid ? 2 : 1))
      refuse_sharding("the mesh has " + std::to_string(mesh->ndim()) +
                      " dimensions: hybrid strategies take two, of which the first replicates and "
                      "the second shards, and the others one");
    return {mesh->get_group(hybrid ? 1 : 0), hybrid ? mesh->get_group(0) : nullptr};
  }
  if (hybrid != (options.replicate_group != nullptr))
    refuse_sharding(
        "the hybrid strategies, and they alone, take process_group, whose ranks share a model, and "
        "replicate_group, whose ranks hold the same shards; or a device_mesh of both");
  return {options.process_group, options.replicate_group};
}

ShardedUnitOptions unit_options(const FullyShardedDataParallelOptions& options) {
  ShardedUnitOptions unit;
  std::tie(unit.group, unit.replicas) = groups_of(options);
  unit.shards = options.sharding_strategy != ShardingStrategy::NO_SHARD;
  if (options.mixed_precision) unit.mixed_precision = *options.mixed_precision;
  const bool keeps = options.sharding_strategy == ShardingStrategy::SHARD_GRAD_OP ||
                     options.sharding_strategy == ShardingStrategy::HYBRID_SHARD_ZERO2;
  unit.after_forward = keeps ? Keep::all : Keep::nothing;
  if (options.reshard_after_forward) {
    if (keeps || !unit.shards)
      refuse_sharding("reshard_after_forward goes with FULL_SHARD and HYBRID_SHARD");
    unit.part_ranks = *options.reshard_after_forward;
    const int all = (unit.group ? unit.group : default_group())->size();
    unit.after_forward = unit.part_ranks == 1     ? Keep::all
                         : unit.part_ranks == all ? Keep::nothing
                                                  : Keep::part;
  }
  unit.sync_module_states = options.sync_module_states;
  unit.backward_prefetch = options.backward_prefetch;
  unit.forward_prefetch = options.forward_prefetch;
  unit.gradient_compression = options.gradient_compression;
  unit.parameter_compression = options.parameter_compression;
  unit.device = options.device;
  unit.cpu_offload = options.cpu_offload;
  unit.timeline = options.timeline;
  return unit;
}

/// The dimension along which each parameter of `parts` is divided.
std::vector<std::int64_t> shard_dims(const ModuleParts& parts,
                                     const FullyShardedDataParallelOptions& options) {
  std::vector<std::int64_t> dims;
  for (const auto& [name, tensor, sparse] : parts.parameters)
    dims.push_back(options.shard_placement_fn ? options.shard_placement_fn(tensor).value_or(0) : 0);
  return dims;
}

/// `state` by name.
std::map<std::string, at::Tensor> by_name(const StateDict& state) {
  std::map<std::string, at::Tensor> all;
  for (const auto& [name, tensor] : state)
    if (!all.emplace(name, tensor).second)
      refuse_sharding("'" + name + "' stands twice in the state that is to be loaded");
  return all;
}

}  // namespace

struct ShardedCore::State {
  torch::nn::Module* module = nullptr;
  std::shared_ptr<torch::nn::Module> keeps_alive;
  std::shared_ptr<ShardedUnit> unit;
  std::shared_ptr<SharedPass> pass;  // of a unit of several modules
  std::size_t member = 0;            // this module's number in it

  ~State() {
    if (unit) units_of_modules().remove(module);
  }
  /// This unit and those inside it.
  std::vector<ShardedUnit*> units() const {
    std::vector<ShardedUnit*> all;
    collect(*module, all);
    return all;
  }
  static void collect(const torch::nn::Module& from, std::vector<ShardedUnit*>& all) {
    ShardedUnit* found = unit_of(from);
    if (found != nullptr && std::ranges::find(all, found) == all.end()) all.push_back(found);
    for (const auto& child : from.children()) collect(*child, all);
  }
  template <class Visit>
  StateDict gather(Visit visit) const;
  void load(const StateDict& state, bool whole);
};

ShardedCore::ShardedCore(torch::nn::Module& module, const FullyShardedDataParallelOptions& options)
    : state_(std::make_unique<State>()) {
  if (unit_of(module) != nullptr) refuse_sharding("this " + module.name() + " is sharded already");
  const Ignored ignored = ignored_by(options);
  if (options.auto_wrap_policy) {
    std::unordered_map<const torch::nn::Module*, torch::nn::AnyModule> wrapped;
    wrap_inside(module, options, ignored, wrapped);
  }
  materialize_own(module, options, ignored);
  state_->module = &module;
  state_->keeps_alive = module.weak_from_this().lock();
  const ModuleParts parts = own_parts(module, ignored);
  ShardedUnitOptions of_unit = unit_options(options);
  of_unit.shard_dims = shard_dims(parts, options);
  state_->unit = std::make_shared<ShardedUnit>(parts, of_unit);
  units_of_modules().put(&module, state_->unit.get());
}

ShardedCore::ShardedCore(torch::nn::Module& module, std::shared_ptr<ShardedUnit> unit,
                         std::shared_ptr<SharedPass> pass, std::size_t member)
    : state_(std::make_unique<State>()) {
  state_->module = &module;
  state_->unit = std::move(unit);
  state_->pass = std::move(pass);
  state_->member = member;
  units_of_modules().put(&module, state_->unit.get());
}

ShardedCore::~ShardedCore() = default;

std::vector<at::Tensor> ShardedCore::before_forward(std::vector<at::Tensor> inputs) {
  State& state = *state_;
  return state.pass ? state.pass->before_forward(*state.unit, state.member, std::move(inputs))
                    : state.unit->before_forward(std::move(inputs));
}
void ShardedCore::after_forward(const std::vector<at::Tensor>& outputs) {
  State& state = *state_;
  state.pass ? state.pass->after_forward(*state.unit, state.member, outputs)
             : state.unit->after_forward(outputs);
}
void ShardedCore::leave_forward() noexcept {
  State& state = *state_;
  state.pass ? state.pass->leave_forward(*state.unit) : state.unit->leave_forward();
}

void ShardedCore::set_require_sync(bool on) {
  for (ShardedUnit* unit : state_->units()) unit->set_require_sync(on);
}
void ShardedCore::drop_gradients() {
  for (ShardedUnit* unit : state_->units()) unit->drop_gradients();
}
bool ShardedCore::require_sync() const { return state_->unit->require_sync(); }

void ShardedCore::summon() {
  try {
    for (ShardedUnit* unit : state_->units()) unit->summon();
  } catch (...) {
    end_summon(false);
    throw;
  }
}
void ShardedCore::end_summon(bool writeback) noexcept {
  for (ShardedUnit* unit : state_->units()) {
    try {
      unit->end_summon(writeback);
    } catch (const std::exception& error) {
      log(LogLevel::error, std::string("FullyShardedDataParallel: changes made while the full "
                                       "parameters were summoned are lost: ") +
                               error.what());
    }
  }
}

double ShardedCore::clip_grad_norm(double max_norm, double norm_type) {
  return parallel::clip_grad_norm(state_->units(), {}, max_norm, norm_type);
}
const Group& ShardedCore::group() const {
  const ShardedUnit& unit = *state_->unit;
  return unit.group()->size() == 1 && unit.replicas() ? unit.replicas() : unit.group();
}
void ShardedCore::unshard(bool async_op) {
  async_op ? state_->unit->start_unshard() : state_->unit->unshard();
}
void ShardedCore::reshard() { state_->unit->reshard(); }
ShardedUnit& ShardedCore::unit() { return *state_->unit; }
std::vector<ShardedUnit*> ShardedCore::all_units() const { return state_->units(); }
ShardedMemory ShardedCore::memory() const {
  ShardedMemory memory;
  for (ShardedUnit* unit : state_->units()) {
    memory.parameters += unit->parameters().shard_bytes();
    memory.gradients += unit->parameters().gradient_bytes();
  }
  const ShardedMeter& meter = state_->unit->parameters().meter();
  memory.gathered = meter.gathered.now();
  memory.gathered_peak = meter.gathered.peak();
  memory.staging_peak = meter.staging.peak();
  return memory;
}
void ShardedCore::reset_peak_memory() {
  ShardedMeter& meter = state_->unit->parameters().meter();
  meter.gathered.reset_peak();
  meter.staging.reset_peak();
}
std::size_t ShardedCore::units() const { return state_->units().size(); }
std::int64_t ShardedCore::unsharded_bytes() const {
  std::int64_t bytes = 0;
  for (ShardedUnit* unit : state_->units()) bytes += unit->parameters().unsharded_bytes();
  return bytes;
}

// ---- state

/// `visit(unit)` returns one tensor per parameter of the unit, or none. The result is in
/// registration order.
template <class Visit>
StateDict ShardedCore::State::gather(Visit visit) const {
  std::map<const void*, at::Tensor> values;
  bool any = false;
  for (ShardedUnit* of : units()) {
    const std::vector<at::Tensor> tensors = visit(*of);
    for (std::size_t i = 0; i < tensors.size(); ++i)
      values[of->parameters()[i].unsafeGetTensorImpl()] = tensors[i];
    any = any || !tensors.empty();
  }
  StateDict all;
  if (!any) return all;
  for (const auto& item : module->named_parameters()) {
    const auto found = values.find(item.value().unsafeGetTensorImpl());
    all.emplace_back(item.key(), found != values.end() ? found->second : item.value().detach());
  }
  return all;
}

StateDict ShardedCore::state_dict(bool rank0_only) {
  const bool wanted = !rank0_only || state_->unit->is_first();
  StateDict all = state_->gather([wanted](ShardedUnit& unit) {
    std::vector<at::Tensor> tensors = unit.parameters().full();
    if (!wanted) tensors.clear();
    for (at::Tensor& tensor : tensors)
      tensor = tensor.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
    return tensors;
  });
  if (wanted)
    for (const auto& item : state_->module->named_buffers())
      all.emplace_back(item.key(), item.value().detach().to(at::kCPU).clone());
  return all;
}

StateDict ShardedCore::sharded_state_dict() {
  StateDict all = state_->gather([](ShardedUnit& unit) {
    std::vector<at::Tensor> tensors;
    for (std::size_t i = 0; i < unit.parameters().size(); ++i)
      tensors.push_back(unit.parameters()[i].detach());
    return tensors;
  });
  for (const auto& item : state_->module->named_buffers())
    all.emplace_back(item.key(), item.value().detach());
  return all;
}

void ShardedCore::State::load(const StateDict& state, bool whole) {
  const at::NoGradGuard no_grad;
  auto given = by_name(state);
  const auto take = [&given](const std::string& name) {
    const auto found = given.find(name);
    if (found == given.end())
      refuse_sharding("'" + name + "' is not in the state that is to be loaded");
    const at::Tensor tensor = found->second;
    given.erase(found);
    return tensor;
  };
  std::map<const void*, at::Tensor> values;
  std::vector<std::pair<at::Tensor, at::Tensor>> whole_ones;  // buffers and ignored parameters
  for (const auto& item : module->named_parameters()) {
    const at::Tensor value = take(item.key());
    if (is_sharded(item.value()))
      values[item.value().unsafeGetTensorImpl()] = value;
    else
      whole_ones.emplace_back(item.value(), value);
  }
  for (const auto& item : module->named_buffers())
    whole_ones.emplace_back(item.value(), take(item.key()));
  if (!given.empty())
    refuse_sharding("the module has no '" + given.begin()->first +
                    "', which is in the state that is to be loaded");
  for (ShardedUnit* of : units()) {
    ShardedParameters& parameters = of->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& value = values.at(parameters[i].unsafeGetTensorImpl());
      if (whole) {
        parameters.set(i, value);
      } else {
        if (value.sizes() != parameters[i].sizes())
          refuse_sharding("'" + parameters.name(i) + "' has " +
                          std::to_string(parameters[i].numel()) + " elements on this rank and " +
                          std::to_string(value.numel()) +
                          " in the state: it is of another number of ranks, or of another rank");
        parameters[i].copy_(value);
      }
    }
  }
  for (auto& [tensor, value] : whole_ones) tensor.copy_(value);
}

void ShardedCore::load_state_dict(const StateDict& state) { state_->load(state, true); }
void ShardedCore::load_sharded_state_dict(const StateDict& state) { state_->load(state, false); }

}  // namespace parallel

void fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                 const FullyShardedDataParallelOptions& options) {
  using namespace parallel;
  const Ignored ignored = ignored_by(options);
  ModuleParts parts{.class_name = "several modules", .parameters = {}, .buffers = {}};
  std::vector<ShardableModule*> marked;
  for (std::size_t i = 0; i < modules.size(); ++i) {
    torch::nn::Module& module = *modules[i];
    marked.push_back(dynamic_cast<ShardableModule*>(&module));
    if (marked.back() == nullptr)
      refuse_sharding("module " + std::to_string(i) + ", a " + module.name() +
                      ", is not held by a Shardable, so its calls are not seen");
    if (unit_of(module) != nullptr)
      refuse_sharding("this " + module.name() + " is sharded already");
    materialize_own(module, options, ignored);
    const ModuleParts own = own_parts(module, ignored);
    for (const auto& [from, to] :
         {std::pair{&own.parameters, &parts.parameters}, std::pair{&own.buffers, &parts.buffers}})
      for (ModuleParts::Named each : *from) {
        each.name = joined(std::to_string(i), each.name);
        to->push_back(std::move(each));
      }
  }
  if (modules.empty()) refuse_sharding("a unit of no modules");
  ShardedUnitOptions of_unit = unit_options(options);
  of_unit.shard_dims = shard_dims(parts, options);
  const auto unit = std::make_shared<ShardedUnit>(parts, of_unit);
  const auto pass = std::make_shared<SharedPass>(modules.size(), of_unit.mixed_precision);
  for (std::size_t i = 0; i < modules.size(); ++i)
    marked[i]->core = std::make_shared<ShardedCore>(*modules[i], unit, pass, i);
}

std::optional<ShardedTensor> sharded_tensor(const at::Tensor& parameter) {
  const auto part = parallel::sharded_part(parameter);
  if (!part) return {};
  if (!part->dim)
    parallel::refuse_sharding("a parameter that is divided flat is no part along a dimension");
  std::vector<Group> groups;
  std::vector<Placement> placements;
  if (part->replicas) {
    groups.push_back(part->replicas);
    placements.push_back(Placement::replicate());
  }
  groups.push_back(part->group);
  placements.push_back(Placement::shard(*part->dim));
  return ShardedTensor(parameter.detach(), part->sizes, std::move(groups), std::move(placements));
}

AutoWrapPolicy size_based_auto_wrap_policy(std::int64_t min_num_params) {
  return [min_num_params](const torch::nn::Module&, std::int64_t parameters) {
    return parameters >= min_num_params;
  };
}

}  // namespace muster
