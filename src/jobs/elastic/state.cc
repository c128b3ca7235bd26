#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/types.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/modules/state_access.h"
#include "core/group/errors.h"
#include "jobs/elastic/epoch_follower.h"
#include "jobs/elastic/memory_commits.h"
#include "jobs/elastic/state_sync.h"
#include "muster/checkpoint.h"
#include "muster/collectives.h"
#include "muster/elastic.h"
#include "muster/init.h"
#include "muster/zero_redundancy_optimizer.h"
#include "train/modules/packed_broadcast.h"

namespace muster::elastic {

/// One commit of what all ranks have alike. Memory of tensors stays for later ones.
struct Commit {
  std::int64_t number = 0;  // 0: none
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  std::string values;
};

/// The objects that a ShardedState has bound.
struct BoundShards {
  checkpoint::State held;
  std::vector<torch::nn::Module*> modules;
  bool is_restored = false;
};

struct State::StateParts {
  checkpoint::State held;
  std::vector<torch::nn::Module*> modules;
  std::vector<std::pair<std::int64_t, at::Generator>> generators;
  // Without shards: as no rank has more than the others, a survivor has everything.
  Commit commits[2];
  int current = 0;  // of `commits`
  // With shards.
  MemoryCommits memory;
  std::int64_t in_memory = 0;  // number of the last commit there; 0: commits are in `commits`
  BoundShards* bound = nullptr;

  Commit& last() { return commits[current]; }
  Commit& spare() { return commits[1 - current]; }
  void turn() { current = 1 - current; }
  std::int64_t number() { return in_memory > 0 ? in_memory : last().number; }

  void take(std::int64_t number);
  void put_back(int rank);
  void seed(int rank);

  /// Whether the next commit has shards in it. Throws where they are missing, or not restored yet.
  bool commits_in_memory() const;
  CommitContents contents() const;
  /// Collective; all, or without what is bound. `here`: the last commit of this rank; not
  /// collective.
  void fill_from(const FoundCommit& commit, bool with_bound, bool here = false);
};

namespace {

using checkpoint::CheckpointItem;
using checkpoint::StateAccess;
using nlohmann::json;

void copy_into(at::Tensor& memory, const at::Tensor& tensor) {
  const bool fits = memory.defined() && memory.sizes() == tensor.sizes() &&
                    memory.scalar_type() == tensor.scalar_type() &&
                    memory.device() == tensor.device();
  if (fits)
    memory.copy_(tensor);
  else
    memory = tensor.detach().clone(at::MemoryFormat::Contiguous);
}

/// Seeds that are far from each other for neighbours (splitmix64).
std::uint64_t mixed(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

std::int64_t max_of(const std::vector<std::int64_t>& values) {
  return *std::max_element(values.begin(), values.end());
}

std::vector<std::int64_t> gathered(std::int64_t mine) {
  at::Tensor all = at::empty({get_world_size()}, at::kLong);
  all_gather_into_tensor(all, at::full({1}, mine, at::kLong));
  return {all.const_data_ptr<std::int64_t>(), all.const_data_ptr<std::int64_t>() + all.numel()};
}

/// A text of the source for all.
std::string shared_text(std::string text, int source) {
  at::Tensor length = at::full({1}, static_cast<std::int64_t>(text.size()), at::kLong);
  broadcast(length, {.src = source});
  text.resize(static_cast<std::size_t>(length.item<std::int64_t>()));
  if (text.empty()) return text;
  broadcast(at::from_blob(text.data(), {static_cast<std::int64_t>(text.size())}, at::kByte),
            {.src = source});
  return text;
}

std::string description_of(const Commit& commit) {
  json tensors = json::array();
  for (std::size_t i = 0; i < commit.tensors.size(); ++i) {
    const at::Tensor& tensor = commit.tensors[i];
    tensors.push_back({commit.names[i], static_cast<int>(tensor.scalar_type()),
                       tensor.sizes().vec(), tensor.device().str()});
  }
  return json({commit.number, commit.values, std::move(tensors)}).dump();
}

Commit commit_like(const std::string& description) {
  const json all = json::parse(description);
  Commit commit;
  commit.number = all[0].get<std::int64_t>();
  commit.values = all[1].get<std::string>();
  for (const json& each : all[2]) {
    commit.names.push_back(each[0].get<std::string>());
    // Each rank has an accelerator of its own, the current one.
    c10::Device device(each[3].get<std::string>());
    if (!device.is_cpu()) device.set_index(-1);
    commit.tensors.push_back(at::empty(
        each[2].get<std::vector<std::int64_t>>(),
        at::TensorOptions(static_cast<c10::ScalarType>(each[1].get<int>())).device(device)));
  }
  return commit;
}

}  // namespace

/// Into the older place; the last commit stays what it is until this one is whole.
void State::StateParts::take(std::int64_t number) {
  const at::NoGradGuard no_grad;
  const auto items = StateAccess::items(held, 0);
  Commit& into = spare();
  into.number = 0;
  into.names.clear();
  into.tensors.resize(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    check_whole(items[i]);
    into.names.push_back(items[i].name);
    copy_into(into.tensors[i], items[i].tensor);
  }
  into.values = StateAccess::values(held);
  into.number = number;
  turn();
}

void State::StateParts::put_back(int rank) {
  const at::NoGradGuard no_grad;
  const Commit& from = last();
  shards::Index index;
  index.folder = "the last commit";
  index.values = from.values;
  std::map<std::string, at::Tensor> tensors;
  for (std::size_t i = 0; i < from.tensors.size(); ++i) {
    tensors.emplace(from.names[i], from.tensors[i]);
    index.tensors[from.names[i]] = {{}, from.tensors[i].sizes().vec(), {}};
  }
  for (CheckpointItem& item : StateAccess::wanted(held, index, 0)) {
    const auto found = tensors.find(item.name);
    if (found == tensors.end() || found->second.sizes() != item.tensor.sizes())
      group::invalid("elastic::State: the last commit of the other ranks has no '" + item.name +
                     "' of these sizes; every rank must add the same");
    item.tensor.copy_(found->second);
  }
  StateAccess::finish(held);
  for (torch::nn::Module* module : modules) module->zero_grad();
  seed(rank);
}

void State::StateParts::seed(int rank) {
  for (auto& [base, generator] : generators) {
    std::uint64_t seed = mixed(static_cast<std::uint64_t>(base));
    seed = mixed(seed + static_cast<std::uint64_t>(number()));
    seed = mixed(seed + static_cast<std::uint64_t>(rank));
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

void check_whole(const CheckpointItem& item) {
  std::int64_t elements = 1;
  for (const std::int64_t size : item.sizes) elements *= size;
  if (item.tensor.numel() == elements) return;
  group::invalid("elastic::State: this rank has only a part of '" + item.name +
                 "'; add what is sharded to an elastic::ShardedState inside `train`");
}

State::State() : parts_(std::make_unique<StateParts>()) {}
State::~State() = default;

State& State::add_tensor(const std::string& name, const at::Tensor& tensor) {
  parts_->held.add_tensor(name, tensor);
  return *this;
}
State& State::add_module(const std::string& name, torch::nn::Module& module) {
  parts_->held.add_module(name, module);
  parts_->modules.push_back(&module);
  return *this;
}
State& State::add_optimizer(const std::string& name, torch::optim::Optimizer& optimizer,
                            const torch::nn::Module& of) {
  if (dynamic_cast<parallel::ShardedOptimizer*>(&optimizer) != nullptr)
    group::invalid("elastic::State: '" + name +
                   "' is a ZeroRedundancyOptimizer, of which each rank has a part; add it to an "
                   "elastic::ShardedState inside `train`");
  parts_->held.add_optimizer(name, optimizer, of);
  return *this;
}
State& State::add_value(const std::string& name, bool& value) {
  parts_->held.add_value(name, value);
  return *this;
}
State& State::add_value(const std::string& name, std::int64_t& value) {
  parts_->held.add_value(name, value);
  return *this;
}
State& State::add_value(const std::string& name, double& value) {
  parts_->held.add_value(name, value);
  return *this;
}
State& State::add_value(const std::string& name, std::string& value) {
  parts_->held.add_value(name, value);
  return *this;
}
State& State::add_sampler(const std::string& name, DistributedSampler& sampler) {
  parts_->held.add_sampler(name, sampler);
  return *this;
}
State& State::add_random(std::int64_t seed, const std::optional<at::Generator>& generator) {
  parts_->generators.emplace_back(seed,
                                  generator ? *generator : at::detail::getDefaultCPUGenerator());
  return *this;
}

std::int64_t State::commits() const { return parts_->number(); }

bool agree_on_commit(std::int64_t number, bool leaving) {
  const at::Tensor vote = at::tensor({number, -number, std::int64_t{leaving}}, at::kLong);
  all_reduce(vote, {.op = ReduceOp::MAX});
  const auto* agreed = vote.const_data_ptr<std::int64_t>();
  if (agreed[0] == -agreed[1]) return agreed[2] != 0;
  throw DistError("commit: some rank makes commit " + std::to_string(-agreed[1]) +
                      " while another makes commit " + std::to_string(agreed[0]) +
                      "; every rank must commit after the same steps",
                  Code::mismatch);
}

bool State::StateParts::commits_in_memory() const {
  if (bound == nullptr) {
    if (in_memory == 0) return false;
    group::invalid(
        "elastic::State::commit: commits before this one have sharded parts, and nothing sharded "
        "is bound now; make the elastic::ShardedState in every call of `train`, and keep it until "
        "the end of that");
  }
  if (bound->is_restored) return true;
  group::invalid(
      "elastic::State::commit: an elastic::ShardedState is bound that has not been restored; call "
      "its restore() once everything is added, also in the first epoch");
}

void State::commit() {
  const std::int64_t number = commits() + 1;
  if (!is_initialized()) return parts_->take(number);
  const EpochFollower& follower = EpochFollower::of_process();
  const bool own = follower.leaving();
  const bool in_memory = parts_->commits_in_memory();
  // A part that no other rank has must be safe before any rank takes the commit for made.
  if (in_memory) parts_->memory.write(number, parts_->contents());
  const bool any = agree_on_commit(number, own);
  if (in_memory) {
    parts_->memory.agreed();
    parts_->in_memory = number;
  } else {
    parts_->take(number);
  }
  parts_->seed(get_rank());
  if (own || (any && follower.is_only_node()))
    throw Preempted(
        "this node is to be given up; commit " + std::to_string(number) + " was its last",
        Code::aborted);
}

void State::restore() {
  if (commits() == 0) group::invalid("elastic::State::restore: there is no commit yet");
  const int rank = is_initialized() ? get_rank() : 0;
  if (parts_->in_memory == 0) return parts_->put_back(rank);
  const bool with_bound = parts_->bound != nullptr && parts_->bound->is_restored;
  parts_->fill_from(parts_->memory.last(), with_bound, /*here=*/true);
  parts_->seed(rank);
}

void StateSync::before_leaving(State& state) {
  const State::StateParts& parts = *state.parts_;
  if (parts.in_memory > 0 ? parts.memory.has_last() : state.commits() > 0) state.restore();
}

void StateSync::from_survivors(State& state) {
  State::StateParts& parts = *state.parts_;
  parts.memory.adopt(EpochFollower::of_process().take_memories());
  if (max_of(gathered(parts.memory.has_any() ? 1 : 0)) > 0) {
    if (const auto found = parts.memory.find()) {
      parts.fill_from(*found, /*with_bound=*/false);
      parts.in_memory = found->id.number;
      parts.seed(get_rank());
      return;
    }
  }
  parts.in_memory = 0;
  auto numbers = gathered(parts.last().number);
  if (max_of(numbers) == 0) {
    numbers[0] = 1;
    if (get_rank() == 0) parts.take(1);
  }
  const std::int64_t newest = max_of(numbers);
  const auto first = std::find(numbers.begin(), numbers.end(), newest);
  const bool all_have_it =
      std::all_of(first, numbers.end(), [&](std::int64_t each) { return each == newest; }) &&
      first == numbers.begin();
  if (!all_have_it) {
    const int source = static_cast<int>(first - numbers.begin());
    const bool mine = source == get_rank();
    const std::string description =
        shared_text(mine ? description_of(parts.last()) : std::string(), source);
    // A rank that has that commit already gets it once more, into the other place.
    Commit got = mine ? parts.last() : commit_like(description);
    parallel::PackedBroadcast().send_from(default_group(), source, got.tensors);
    if (!mine) {
      parts.spare() = std::move(got);
      parts.turn();
    }
  }
  parts.put_back(get_rank());
}

/// The part that all ranks have alike, and this rank's bound shards.
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
