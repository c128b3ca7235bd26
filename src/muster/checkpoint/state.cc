#include "muster/checkpoint/state_access.h"

#include <torch/types.h>

#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "muster/checkpoint/json_values.h"
#include "muster/checkpoint/optimizer_fields.h"
#include "muster/group/errors.h"
#include "muster/zero_redundancy_optimizer.h"

namespace muster::checkpoint {

using nlohmann::json;

namespace {

/// One thing that was added. What an entry does not need stays empty.
struct StateEntry {
  std::function<void(std::vector<CheckpointItem>&, int rank)> items = {};
  std::function<void(json&)> values = {};
  /// Absent: `items`.
  std::function<void(std::vector<CheckpointItem>&, const shards::Index&, int rank)> wanted = {};
  std::function<void()> filled = {};  ///< after the tensors have been loaded
  std::function<void(const json& values, const shards::Index&)> read = {};
};

/// `value[name]`, a complaint where there is none or of another type.
template <class T>
void read_value(const json& values, const shards::Index& index, const std::string& name, T& value) {
  const auto found = values.find(name);
  if (found == values.end())
    group::invalid("checkpoint: " + index.folder + " has no value '" + name + "'");
  try {
    value = decoded<T>(*found);
  } catch (const json::exception&) {
    group::invalid("checkpoint: the value '" + name + "' of " + index.folder + " is " +
                   found->dump() + ", which is of another type");
  }
}

template <class T>
StateEntry value_entry(const std::string& name, T& value) {
  return {.values = [name, &value](json& values) { values[name] = encoded(value); },
          .read = [name, &value](
                      const json& values,
                      const shards::Index& index) { read_value(values, index, name, value); }};
}

StateEntry item_entry(CheckpointItem item) {
  return {.items = [item = std::move(item)](std::vector<CheckpointItem>& items, int) {
    items.push_back(item);
  }};
}

/// An optimizer as its entry sees it: for ZeRO, the part that this rank has.
class OptimizerEntry {
 public:
  OptimizerEntry(std::string name, torch::optim::Optimizer& optimizer, const torch::nn::Module& of)
      : name_(std::move(name)), whole_(optimizer) {
    for (const auto& named : of.named_parameters())
      names_[named.value().unsafeGetTensorImpl()] = named.key();
    for (const auto& group : whole_.param_groups())
      for (const at::Tensor& parameter : group.params()) name_of(parameter);
  }

  void items(std::vector<CheckpointItem>& items) {
    auto& state = part().state();
    for (auto& group : part().param_groups())
      for (const at::Tensor& parameter : group.params()) {
        const auto found = state.find(parameter.unsafeGetTensorImpl());
        if (found == state.end()) continue;
        for (const StateField& field : fields_of(*found->second)) {
          const std::string name = field_name(parameter, field.name);
          // Python counts steps in a float32 tensor.
          if (field.count != nullptr)
            items.push_back(whole_item(name, at::scalar_tensor(*field.count, at::kFloat)));
          else if (field.tensor->defined())
            items.push_back(state_item(name, *field.tensor, parameter));
        }
      }
  }

  void values(json& values) {
    json groups = json::array();
    for (auto& group : whole_.param_groups()) {
      json one = json::parse(text_of_options(group.options()));
      one["params"] = json::array();
      for (const at::Tensor& parameter : group.params())
        one["params"].push_back(name_of(parameter));
      groups.push_back(std::move(one));
    }
    values[name_ + ".param_groups"] = std::move(groups);
  }

  void wanted(std::vector<CheckpointItem>& items, const shards::Index& index) {
    counts_.clear();
    auto& state = part().state();
    for (auto& group : part().param_groups())
      for (const at::Tensor& parameter : group.params()) {
        auto made = new_state_for(group.options());
        bool any = false;
        for (const StateField& field : fields_of(*made)) {
          const std::string name = field_name(parameter, field.name);
          const auto stored = index.tensors.find(name);
          if (stored == index.tensors.end()) continue;
          any = true;
          if (field.count != nullptr) {
            counts_.emplace_back(field.count, at::zeros({}, at::kFloat));
            items.push_back(whole_item(name, counts_.back().second));
            continue;
          }
          *field.tensor = memory_for(stored->second, parameter);
          items.push_back(state_item(name, *field.tensor, parameter));
        }
        if (any)
          state[parameter.unsafeGetTensorImpl()] = std::move(made);
        else
          state.erase(parameter.unsafeGetTensorImpl());
      }
  }

  void filled() {
    for (auto& [count, tensor] : counts_) *count = static_cast<std::int64_t>(tensor.item<float>());
  }

  void read(const json& values, const shards::Index& index) {
    json groups;
    read_value(values, index, name_ + ".param_groups", groups);
    auto& mine = whole_.param_groups();
    if (!groups.is_array() || groups.size() != mine.size())
      group::invalid("checkpoint: '" + name_ + "' has " + std::to_string(mine.size()) +
                     " parameter groups, and another number in " + index.folder);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      read_options(mine[i].options(), groups[i].dump());
      if (&part() != &whole_) read_options(part().param_groups()[i].options(), groups[i].dump());
    }
  }

 private:
  torch::optim::Optimizer& part() {
    auto* divided = dynamic_cast<parallel::ShardedOptimizer*>(&whole_);
    return divided != nullptr ? divided->local() : whole_;
  }
  const std::string& name_of(const at::Tensor& parameter) const {
    const auto found = names_.find(parameter.unsafeGetTensorImpl());
    if (found == names_.end())
      group::invalid("checkpoint: '" + name_ +
                     "' has a parameter that the module does not have; give the module that the "
                     "optimizer's parameters are of");
    return found->second;
  }
  std::string field_name(const at::Tensor& parameter, const char* field) const {
    return name_ + ".state." + name_of(parameter) + "." + field;
  }
  /// As the parameter lies on this rank where what is stored is like the whole of it.
  static at::Tensor memory_for(const shards::StoredTensor& stored, const at::Tensor& parameter) {
    return stored.sizes == whole_sizes(parameter)
               ? at::empty_like(parameter.detach())
               : at::empty(stored.sizes, parameter.options().requires_grad(false));
  }

  const std::string name_;
  torch::optim::Optimizer& whole_;
  std::unordered_map<const void*, std::string> names_;
  std::vector<std::pair<std::int64_t*, at::Tensor>> counts_;
};

}  // namespace

struct State::Entries {
  std::vector<StateEntry> all;
};

State::State() : entries_(std::make_unique<Entries>()) {}
State::~State() = default;
State::State(State&&) noexcept = default;
State& State::operator=(State&&) noexcept = default;

State& State::add_tensor(const std::string& name, const at::Tensor& tensor) {
  entries_->all.push_back(item_entry(whole_item(name, tensor)));
  return *this;
}

State& State::add_box(const std::string& name, const at::Tensor& tensor,
                      std::vector<std::int64_t> sizes, std::vector<std::int64_t> offsets) {
  entries_->all.push_back(item_entry(box_item(name, tensor, std::move(sizes), std::move(offsets))));
  return *this;
}

State& State::add_module(const std::string& name, torch::nn::Module& module) {
  // Looked up at each save and load: a parameter may have got other memory meanwhile.
  entries_->all.push_back({.items = [name, &module](std::vector<CheckpointItem>& items, int) {
    for (const auto& named : module.named_parameters())
      items.push_back(parameter_item(name + "." + named.key(), named.value()));
    for (const auto& named : module.named_buffers())
      items.push_back(whole_item(name + "." + named.key(), named.value()));
  }});
  return *this;
}

State& State::add_optimizer(const std::string& name, torch::optim::Optimizer& optimizer,
                            const torch::nn::Module& of) {
  const auto entry = std::make_shared<OptimizerEntry>(name, optimizer, of);
  entries_->all.push_back(
      {.items = [entry](std::vector<CheckpointItem>& items, int) { entry->items(items); },
       .values = [entry](json& values) { entry->values(values); },
       .wanted = [entry](std::vector<CheckpointItem>& items, const shards::Index& index,
                         int) { entry->wanted(items, index); },
       .filled = [entry] { entry->filled(); },
       .read = [entry](const json& values,
                       const shards::Index& index) { entry->read(values, index); }});
  return *this;
}

State& State::add_value(const std::string& name, bool& value) {
  entries_->all.push_back(value_entry(name, value));
  return *this;
}
State& State::add_value(const std::string& name, std::int64_t& value) {
  entries_->all.push_back(value_entry(name, value));
  return *this;
}
State& State::add_value(const std::string& name, double& value) {
  entries_->all.push_back(value_entry(name, value));
  return *this;
}
State& State::add_value(const std::string& name, std::string& value) {
  entries_->all.push_back(value_entry(name, value));
  return *this;
}

State& State::add_sampler(const std::string& name, DistributedSampler& sampler) {
  const std::string key = name + ".epoch";
  entries_->all.push_back(
      {.values = [key, &sampler](json& values) { values[key] = sampler.epoch(); },
       .read =
           [key, &sampler](const json& values, const shards::Index& index) {
             std::uint64_t epoch = 0;
             read_value(values, index, key, epoch);
             sampler.set_epoch(epoch);
           }});
  return *this;
}

State& State::add_random(const std::string& name, const std::optional<at::Generator>& generator) {
  const at::Generator of = generator ? *generator : at::detail::getDefaultCPUGenerator();
  const auto key = [name](int rank) { return name + ".torch." + std::to_string(rank); };
  const auto state = [of] {
    at::Generator mutable_of = of;
    const std::lock_guard lock(mutable_of.mutex());
    return of.get_state();
  };
  const auto loaded = std::make_shared<at::Tensor>();
  entries_->all.push_back(
      {.items = [key, state](std::vector<CheckpointItem>& items,
                             int rank) { items.push_back(whole_item(key(rank), state())); },
       .wanted =
           [key, state, loaded](std::vector<CheckpointItem>& items, const shards::Index& index,
                                int rank) {
             loaded->reset();
             if (!index.tensors.contains(key(rank))) return;
             *loaded = at::empty_like(state());
             items.push_back(whole_item(key(rank), *loaded));
           },
       .filled =
           [of, loaded] {
             at::Generator mutable_of = of;
             const std::lock_guard lock(mutable_of.mutex());
             if (loaded->defined()) mutable_of.set_state(*loaded);
           }});
  return *this;
}

std::vector<CheckpointItem> StateAccess::items(const State& state, int rank) {
  std::vector<CheckpointItem> items;
  for (const StateEntry& entry : state.entries_->all)
    if (entry.items) entry.items(items, rank);
  return items;
}

std::string StateAccess::values(const State& state) {
  json values = json::object();
  for (const StateEntry& entry : state.entries_->all)
    if (entry.values) entry.values(values);
  for (const auto& [name, value] : values.items()) try {
      static_cast<void>(json(name).dump());
      static_cast<void>(value.dump());
    } catch (const json::exception&) {
      group::invalid("checkpoint: the value '" + name +
                     "' has text that is not UTF-8, which JSON cannot hold: add bytes as a tensor");
    }
  return values.dump();
}

std::vector<CheckpointItem> StateAccess::wanted(State& state, const shards::Index& index,
                                                int rank) {
  std::vector<CheckpointItem> items;
  for (const StateEntry& entry : state.entries_->all) {
    if (entry.wanted)
      entry.wanted(items, index, rank);
    else if (entry.items)
      entry.items(items, rank);
  }
  return items;
}

void StateAccess::finish(State& state, const shards::Index& index, bool with_values) {
  const json values = json::parse(index.values, nullptr, false);
  for (const StateEntry& entry : state.entries_->all) {
    if (entry.filled) entry.filled();
    if (entry.read && with_values) entry.read(values, index);
  }
}

}  // namespace muster::checkpoint
