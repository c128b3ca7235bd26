#include <torch/types.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>

#include "checkpoint/modules/state_access.h"
#include "core/group/errors.h"
#include "jobs/elastic/epoch_follower.h"
#include "jobs/elastic/state_parts.h"
#include "jobs/elastic/state_sync.h"
#include "muster/init.h"

namespace muster::elastic {

using checkpoint::CheckpointItem;
using checkpoint::StateAccess;
using nlohmann::json;

/// What all ranks have alike, and what is bound.
CommitContents State::StateParts::contents() const {
  CommitContents contents;
  contents.items = StateAccess::items(held, 0);
  contents.alike = contents.items.size();
  for (const CheckpointItem& item : contents.items) check_whole(item);
  json values = {StateAccess::values(held), StateAccess::values(bound->held)};
  contents.values = values.dump();
  for (CheckpointItem& item : StateAccess::items(bound->held, 0))
    contents.items.push_back(std::move(item));
  std::set<std::string_view> names;
  for (const CheckpointItem& item : contents.items)
    if (!names.insert(item.name).second)
      group::invalid("elastic::ShardedState: '" + item.name +
                     "' is added twice; add what is sharded to the ShardedState only, and under a "
                     "name of its own");
  return contents;
}

void State::StateParts::fill_from(const FoundCommit& commit, bool with_bound, bool here) {
  const at::NoGradGuard no_grad;
  shards::Index of_held = commit.index, of_bound = commit.index;
  const json values = json::parse(commit.values);
  of_held.values = values.at(0);
  of_bound.values = values.at(1);
  auto items = StateAccess::wanted(held, of_held, 0);
  if (with_bound)
    for (CheckpointItem& item : StateAccess::wanted(bound->held, of_bound, 0))
      items.push_back(std::move(item));
  if (here)
    memory.fill_here(commit, items);
  else
    memory.fill(commit, items);
  StateAccess::finish(held);
  for (torch::nn::Module* module : modules) module->zero_grad();
  if (!with_bound) return;
  StateAccess::finish(bound->held);
  for (torch::nn::Module* module : bound->modules) module->zero_grad();
}

struct ShardedState::ShardedParts {
  explicit ShardedParts(State::StateParts& state) : of(state) {}

  State::StateParts& of;
  BoundShards bound;
};

ShardedState::ShardedState(State& state) : parts_(std::make_unique<ShardedParts>(*state.parts_)) {
  if (parts_->of.bound != nullptr)
    group::invalid(
        "elastic::ShardedState: the State has one already; add everything sharded to that one");
  parts_->of.bound = &parts_->bound;
}

ShardedState::~ShardedState() { parts_->of.bound = nullptr; }

ShardedState& ShardedState::add_module(const std::string& name, torch::nn::Module& module) {
  parts_->bound.held.add_module(name, module);
  parts_->bound.modules.push_back(&module);
  return *this;
}

ShardedState& ShardedState::add_optimizer(const std::string& name,
                                          torch::optim::Optimizer& optimizer,
                                          const torch::nn::Module& of) {
  parts_->bound.held.add_optimizer(name, optimizer, of);
  return *this;
}

void ShardedState::restore() {
  State::StateParts& state = parts_->of;
  const EpochFollower& follower = EpochFollower::of_process();
  std::optional<CommitId> restored;
  if (const auto found = state.memory.find()) {
    state.fill_from(*found, /*with_bound=*/true);
    restored = found->id;
  }
  // From here on this epoch's ranks have this commit, whatever the ranks of earlier ones had.
  const std::int64_t number =
      restored ? restored->number : std::max<std::int64_t>(1, state.number());
  state.memory.begin_epoch(follower.epoch(), follower.node(), restored);
  state.memory.write(number, state.contents());
  agree_on_commit(number, false);
  state.memory.agreed();
  state.in_memory = number;
  state.commits[0] = state.commits[1] = {};  // they are not needed any more
  parts_->bound.is_restored = true;
  state.seed(get_rank());
}

}  // namespace muster::elastic
