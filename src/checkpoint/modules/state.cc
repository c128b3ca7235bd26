// SPDX-License-Identifier: BSD-3-Clause
#include <torch/types.h>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/format/files/disk.h"
#include "checkpoint/format/files/index.h"
#include "checkpoint/format/history.h"
#include "checkpoint/format/load.h"
#include "checkpoint/format/save.h"
#include "checkpoint/modules/engine.h"
#include "checkpoint/modules/json_values.h"
#include "checkpoint/modules/optimizer_entry.h"
#include "checkpoint/modules/state_access.h"
#include "core/group/errors.h"
#include "muster/checkpoint.h"
#include "muster/init.h"

namespace muster::checkpoint {
using nlohmann::json;

namespace {

/// One thing that was added. Functions that an entry does not need stay empty.
struct StateEntry {
  std::function<void(std::vector<CheckpointItem>&, int rank)> items = {};
  std::function<void(json&)> values = {};
  /// Absent: `items`. Changes nothing of what was added. `values` null: there are none.
  std::function<void(std::vector<CheckpointItem>&, const shards::Index&, const json* values,
                     int rank)>
      wanted = {};
  std::function<void()> filled = {};  ///< after the tensors have been loaded
  /// Throws where the value is not there or of another type; what it returns puts it in place.
  std::function<std::function<void()>(const json& values, const shards::Index&)> read = {};
};

/// `values[name]`, a complaint where there is none or of another type.
template <class T>
T read_value(const json& values, const shards::Index& index, const std::string& name) {
  const auto found = values.find(name);
  if (found == values.end())
    group::invalid("checkpoint: " + index.folder + " has no value '" + name + "'");
  try {
    return decoded<T>(*found);
  } catch (const json::exception&) {
    group::invalid("checkpoint: the value '" + name + "' of " + index.folder + " is " +
                   found->dump() + ", which is of another type");
  }
}

template <class T>
StateEntry value_entry(const std::string& name, T& value) {
  return {.values = [name, &value](json& values) { values[name] = encoded(value); },
          .read =
              [name, &value](const json& values, const shards::Index& index) {
                return [&value, read = read_value<T>(values, index, name)] { value = read; };
              }};
}

StateEntry item_entry(CheckpointItem item) {
  return {.items = [item = std::move(item)](std::vector<CheckpointItem>& items, int) {
    items.push_back(item);
  }};
}

}  // namespace

struct State::Entries {
  std::vector<StateEntry> all;
  std::vector<std::function<void()>> finish;  // of the last `wanted`
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
                         const json* values, int) { entry->wanted(items, index, values); },
       .filled = [entry] { entry->filled(); }});
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
             return [&sampler, epoch = read_value<std::uint64_t>(values, index, key)] {
               sampler.set_epoch(epoch);
             };
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
                                const json*, int rank) {
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

std::vector<CheckpointItem> StateAccess::wanted(State& state, const shards::Index& index, int rank,
                                                bool with_values) {
  std::vector<CheckpointItem> items;
  auto& finish = state.entries_->finish;
  finish.clear();
  const json values = json::parse(index.values, nullptr, false);
  for (const StateEntry& entry : state.entries_->all) {
    if (entry.wanted)
      entry.wanted(items, index, with_values ? &values : nullptr, rank);
    else if (entry.items)
      entry.items(items, rank);
    if (entry.filled) finish.push_back(entry.filled);
    if (entry.read && with_values) finish.push_back(entry.read(values, index));
  }
  return items;
}

void StateAccess::finish(State& state) {
  for (const auto& each : std::exchange(state.entries_->finish, {})) each();
}

namespace {

Group group_of(const Group& given) {
  if (given) return given;
  return is_initialized() ? default_group() : nullptr;
}

int rank_in(const Group& group) { return group ? group->rank() : 0; }

shards::CommitOptions options_of(const std::string& path, const SaveOptions& options) {
  return {.path = path,
          .step = options.step,
          .overwrite = options.overwrite,
          .keep_last = options.keep_last};
}

/// The items and values to save. If their collection throws on one rank, the others are told.
struct Contents {
  std::vector<CheckpointItem> items;
  std::string values;

  Contents(const State& state, int rank, Saver& saver) try
      : items(StateAccess::items(state, rank)), values(StateAccess::values(state)) {
  } catch (const std::exception& error) {
    saver.fail(error);
    throw;
  }
};

}  // namespace

void save(const State& state, const std::string& path, const SaveOptions& options) {
  const Group group = group_of(options.process_group);
  const auto saver = saver_of(group);
  const Contents contents(state, rank_in(group), *saver);
  saver->save(contents.items, contents.values, options_of(path, options));
}

Saving async_save(const State& state, const std::string& path, const SaveOptions& options) {
  const Group group = group_of(options.process_group);
  const auto saver = saver_of(group);
  const Contents contents(state, rank_in(group), *saver);
  return saver->async_save(contents.items, contents.values, options_of(path, options));
}

std::optional<std::string> latest(const std::string& folder) {
  auto all = shards::checkpoints_in(group::take(shards::local_path(folder)));
  if (all.empty()) return {};
  return std::move(all.back());
}

void load(State& state, const std::string& path, const LoadOptions& options) {
  const shards::SavingRanks ranks = ranks_of(group_of(options.process_group));
  const auto index =
      options.safetensors ? shards::open_safetensors(path) : shards::open_index(path);
  Status mine = index.status();
  std::vector<CheckpointItem> items;
  try {
    if (mine.ok()) {
      items = StateAccess::wanted(state, *index, ranks.rank, /*with_values=*/!options.safetensors);
      mine = check_items(*index, items);
    }
  } catch (const std::exception& error) {  // the other ranks wait for this one's word
    mine = status_of(error);
  }
  group::check(shards::agree_on_index(ranks, mine, index.ok() ? index->digest : std::string()));
  load_items(*index, items, ranks);
  StateAccess::finish(state);
}

}  // namespace muster::checkpoint
