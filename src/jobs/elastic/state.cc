// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/types.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/modules/state_access.h"
#include "core/group/errors.h"
#include "jobs/elastic/state_commits.h"
#include "muster/checkpoint.h"
#include "muster/elastic.h"
#include "muster/zero_redundancy_optimizer.h"

namespace muster::elastic {

/// The objects that a ShardedState has bound.
struct BoundShards {
  checkpoint::State held;
  std::vector<torch::nn::Module*> modules;
};

namespace {

using checkpoint::CheckpointItem;
using checkpoint::StateAccess;

constexpr StateRefusals kRefusals{
    .no_commit = "elastic::State::restore: there is no commit yet",
    .nothing_bound =
        "elastic::State::commit: commits before this one have sharded parts, and nothing sharded "
        "is bound now; make the elastic::ShardedState in every call of `train`, and keep it until "
        "the end of that",
    .not_restored =
        "elastic::State::commit: an elastic::ShardedState is bound that has not been restored; "
        "call its restore() once everything is added, also in the first epoch",
    .bound_already =
        "elastic::ShardedState: the State has one already; add everything sharded to that one"};

/// Seeds that are far from each other for neighbours (splitmix64).
std::uint64_t mixed(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

/// Throws where this rank has only a part of it.
void check_whole(const CheckpointItem& item) {
  std::int64_t elements = 1;
  for (const std::int64_t size : item.sizes) elements *= size;
  if (item.tensor.numel() == elements) return;
  group::invalid("elastic::State: this rank has only a part of '" + item.name +
                 "'; add what is sharded to an elastic::ShardedState inside `train`");
}

}  // namespace

struct State::StateParts final : StateObjects {
  checkpoint::State held;
  std::vector<torch::nn::Module*> modules;
  std::vector<std::pair<std::int64_t, at::Generator>> generators;
  BoundShards* bound = nullptr;
  StateCommits commits{*this, kRefusals};

  AlikeContents contents() override {
    AlikeContents contents;
    contents.rest = StateAccess::values(held);
    for (const CheckpointItem& item : StateAccess::items(held, 0)) {
      check_whole(item);
      contents.names.push_back(item.name);
      contents.tensors.push_back(item.tensor);
    }
    return contents;
  }
  void put_back(const AlikeContents& from) override;
  void reseed(std::int64_t commit, int rank) override;
  ShardedContents sharded_contents() override {
    return {StateAccess::items(bound->held, 0), StateAccess::values(bound->held)};
  }
  std::vector<CheckpointItem> wanted_shards(const shards::Index& index) override {
    return StateAccess::wanted(bound->held, index, 0);
  }
  void put_back_sharded() override {
    StateAccess::finish(bound->held);
    for (torch::nn::Module* module : bound->modules) module->zero_grad();
  }
};

void State::StateParts::put_back(const AlikeContents& from) {
  shards::Index index;
  index.folder = "the last commit";
  index.values = from.rest;
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
}

void State::StateParts::reseed(std::int64_t commit, int rank) {
  for (auto& [base, generator] : generators) {
    std::uint64_t seed = mixed(static_cast<std::uint64_t>(base));
    seed = mixed(seed + static_cast<std::uint64_t>(commit));
    seed = mixed(seed + static_cast<std::uint64_t>(rank));
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
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

std::int64_t State::commits() const { return parts_->commits.number(); }

void State::commit() {
  if (parts_->commits.commit())
    throw Preempted(
        "this node is to be given up; commit " + std::to_string(commits()) + " was its last",
        Code::aborted);
}

void State::restore() { parts_->commits.restore(); }

StateCommits& StateSync::commits_of(State& state) { return state.parts_->commits; }

struct ShardedState::ShardedParts {
  explicit ShardedParts(State::StateParts& state) : of(state) {}

  State::StateParts& of;
  BoundShards bound;
};

ShardedState::ShardedState(State& state) : parts_(std::make_unique<ShardedParts>(*state.parts_)) {
  parts_->of.commits.bind();
  parts_->of.bound = &parts_->bound;
}

ShardedState::~ShardedState() { parts_->of.commits.unbind(); }

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

void ShardedState::restore() { parts_->of.commits.restore_sharded(); }

}  // namespace muster::elastic
