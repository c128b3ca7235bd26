#include "muster/fully_sharded_data_parallel.h"

#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <algorithm>
#include <map>
#include <span>
#include <unordered_map>

#include "muster/base/log.h"
#include "muster/group/errors.h"
#include "muster/parallel/module_parts.h"
#include "muster/parallel/process_table.h"
#include "muster/parallel/sharded_norm.h"
#include "muster/parallel/sharded_unit.h"

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

/// Collects by name the parameters and buffers of `module` that are in no inner unit.
void collect_own(const torch::nn::Module& module, const std::string& path, ModuleParts& parts) {
  for (const auto& item : module.named_parameters(/*recurse=*/false))
    parts.parameters.push_back({joined(path, item.key()), item.value()});
  for (const auto& item : module.named_buffers(/*recurse=*/false))
    parts.buffers.push_back({joined(path, item.key()), item.value()});
  for (const auto& child : module.named_children())
    if (unit_of(*child.value()) == nullptr)
      collect_own(*child.value(), joined(path, child.key()), parts);
}

ModuleParts own_parts(torch::nn::Module& module) {
  ModuleParts parts{.class_name = module.name(),
                    .parameters = {},
                    .buffers = {},
                    .keeps_alive = module.weak_from_this().lock()};
  collect_own(module, "", parts);
  return parts;
}

std::int64_t parameters_without_unit(const torch::nn::Module& module) {
  std::int64_t elements = 0;
  for (const at::Tensor& parameter : module.parameters())
    if (!is_sharded(parameter)) elements += parameter.numel();
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

/// Wraps inner elements first. A module in several places is wrapped once.
void wrap_elements(torch::nn::Module& module, const FullyShardedDataParallelOptions& options,
                   std::unordered_map<const torch::nn::Module*, torch::nn::AnyModule>& wrapped) {
  if (unit_of(module) != nullptr) return;
  for (const auto& child : module.children()) wrap_elements(*child, options, wrapped);
  auto* sequential = module.as<torch::nn::SequentialImpl>();
  if (sequential == nullptr) return;
  FullyShardedDataParallelOptions inner = options;
  inner.auto_wrap_policy = {};
  for (torch::nn::AnyModule& element : *sequential) {
    const auto part = element.ptr();
    const bool is_new = unit_of(*part) == nullptr && part->as<ShardedElement>() == nullptr;
    if (is_new && options.auto_wrap_policy(*part, parameters_without_unit(*part)))
      wrapped.emplace(part.get(), std::make_shared<ShardedElement>(element, inner));
    if (const auto found = wrapped.find(part.get()); found != wrapped.end())
      element = found->second;
  }
}

ShardedUnitOptions unit_options(const FullyShardedDataParallelOptions& options) {
  ShardedUnitOptions unit;
  unit.group = options.process_group;
  if (options.mixed_precision) unit.mixed_precision = *options.mixed_precision;
  unit.reshard_after_forward = options.sharding_strategy == ShardingStrategy::FULL_SHARD;
  unit.sync_module_states = options.sync_module_states;
  return unit;
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
  std::unique_ptr<ShardedUnit> unit;

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
  if (options.auto_wrap_policy) {
    std::unordered_map<const torch::nn::Module*, torch::nn::AnyModule> wrapped;
    wrap_elements(module, options, wrapped);
  }
  state_->module = &module;
  state_->keeps_alive = module.weak_from_this().lock();
  state_->unit = std::make_unique<ShardedUnit>(own_parts(module), unit_options(options));
  units_of_modules().put(&module, state_->unit.get());
}

ShardedCore::~ShardedCore() = default;

std::vector<at::Tensor> ShardedCore::before_forward(std::vector<at::Tensor> inputs) {
  return state_->unit->before_forward(std::move(inputs));
}
void ShardedCore::after_forward(const std::vector<at::Tensor>& outputs) {
  state_->unit->after_forward(outputs);
}
void ShardedCore::leave_forward() noexcept { state_->unit->leave_forward(); }

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
const Group& ShardedCore::group() const { return state_->unit->group(); }
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
  for (const auto& item : module->named_parameters())
    all.emplace_back(item.key(), values.at(item.value().unsafeGetTensorImpl()));
  return all;
}

StateDict ShardedCore::state_dict(bool rank0_only) {
  const bool wanted = !rank0_only || state_->unit->group()->rank() == 0;
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
  for (const auto& item : module->named_parameters())
    values[item.value().unsafeGetTensorImpl()] = take(item.key());
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers;
  for (const auto& item : module->named_buffers())
    buffers.emplace_back(item.value(), take(item.key()));
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
  for (auto& [buffer, value] : buffers) buffer.copy_(value);
}

void ShardedCore::load_state_dict(const StateDict& state) { state_->load(state, true); }
void ShardedCore::load_sharded_state_dict(const StateDict& state) { state_->load(state, false); }

}  // namespace parallel

AutoWrapPolicy size_based_auto_wrap_policy(std::int64_t min_num_params) {
  return [min_num_params](const torch::nn::Module&, std::int64_t parameters) {
    return parameters >= min_num_params;
  };
}

}  // namespace muster
