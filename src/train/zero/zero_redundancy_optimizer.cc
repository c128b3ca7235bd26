// SPDX-License-Identifier: BSD-3-Clause
#include "muster/zero_redundancy_optimizer.h"

#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>
#include <torch/types.h>

#include <algorithm>
#include <sstream>

#include "core/group/errors.h"
#include "muster/init.h"
#include "muster/objects.h"
#include "train/zero/parameter_owners.h"

namespace muster::parallel {

namespace {

using ParamGroups = ShardedOptimizer::ParamGroups;
using torch::optim::OptimizerParamGroup;

std::string saved(const torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::ostringstream out(std::ios::binary);
  archive.save_to(out);
  return std::move(out).str();
}

void load_into(torch::optim::Optimizer& optimizer, const std::string& bytes) {
  std::istringstream in(bytes, std::ios::binary);
  torch::serialize::InputArchive archive;
  archive.load_from(in);
  optimizer.load(archive);
}

ParameterOwners::Groups tensors_of(const ParamGroups& groups) {
  ParameterOwners::Groups all;
  for (const auto& each : groups) all.push_back(each.params());
  return all;
}

void copy_options(const ParamGroups& from, ParamGroups& to) {
  for (std::size_t i = 0; i < from.size(); ++i) to[i].set_options(from[i].options().clone());
}

}  // namespace

// ---- state

struct ShardedOptimizer::State {
  MakeLocal make;
  ZeroRedundancyOptions options;
  ParameterOwners owners;
  std::unique_ptr<torch::optim::Optimizer> local = nullptr;
  std::vector<std::string> collected = {};  // serialised local optimizers by rank

  void divide(const ParamGroups& groups);
  ParamGroups part(const ParamGroups& groups, int rank) const;
  at::Tensor step_bucket(const ParamGroups& groups, const GradBucket& bucket, at::Tensor averaged);
  void step_only(const std::vector<at::Tensor>& parameters);
  std::unique_ptr<torch::optim::Optimizer> whole(const ParamGroups& groups) const;
};

void ShardedOptimizer::State::divide(const ParamGroups& groups) {
  owners.compare(tensors_of(groups));
  owners.divide(tensors_of(groups), owners.group()->size());
}

ParamGroups ShardedOptimizer::State::part(const ParamGroups& groups, int rank) const {
  ParamGroups mine;
  for (auto& parameters : owners.part_of(rank))
    mine.emplace_back(std::move(parameters), groups[mine.size()].options().clone());
  return mine;
}

/// Steps one averaged bucket, on autograd's thread. Returns the averages.
at::Tensor ShardedOptimizer::State::step_bucket(const ParamGroups& groups, const GradBucket& bucket,
                                                at::Tensor averaged) {
  const at::NoGradGuard no_grad;
  const auto mine = owners.begin_bucket(bucket, std::move(averaged));
  copy_options(groups, local->param_groups());
  try {
    step_only(mine);
  } catch (const std::exception& why) {
    owners.fail_step(why, false);
    throw;
  }
  return owners.end_bucket();
}

void ShardedOptimizer::State::step_only(const std::vector<at::Tensor>& parameters) {
  const auto among = [&](const at::Tensor& one) {
    return std::any_of(parameters.begin(), parameters.end(),
                       [&](const at::Tensor& each) { return each.is_same(one); });
  };
  std::vector<std::vector<at::Tensor>> all;
  for (auto& each : local->param_groups()) {
    all.push_back(each.params());
    std::erase_if(each.params(), [&](const at::Tensor& parameter) { return !among(parameter); });
  }
  local->step();
  for (std::size_t g = 0; g < all.size(); ++g)
    local->param_groups()[g].params() = std::move(all[g]);
}

/// The unsharded optimizer, without state.
std::unique_ptr<torch::optim::Optimizer> ShardedOptimizer::State::whole(
    const ParamGroups& groups) const {
  auto optimizer = make(groups);
  copy_options(groups, optimizer->param_groups());
  return optimizer;
}

// ---- the face

ShardedOptimizer::ShardedOptimizer(const ParamGroups& param_groups,
                                   std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                   MakeLocal make, const ZeroRedundancyOptions& options)
    : Optimizer(param_groups, std::move(defaults)) {
  const Group group = options.process_group ? options.process_group : default_group();
  if (!group->is_member())
    group::invalid("ZeroRedundancyOptimizer: this rank is not a member of process_group");
  state_of_shard_ = std::make_unique<State>(
      State{std::move(make), options, {group, options.parameters_as_bucket_view}});
  State& state = *state_of_shard_;
  state.divide(param_groups_);
  state.local = state.make(state.part(param_groups_, group->rank()));
}

ShardedOptimizer::~ShardedOptimizer() = default;

void ShardedOptimizer::add_param_group(const OptimizerParamGroup& param_group) {
  State& state = *state_of_shard_;
  Optimizer::add_param_group(param_group);
  state.divide(param_groups_);
  state.local->add_param_group(state.part(param_groups_, state.owners.group()->rank()).back());
}

at::Tensor ShardedOptimizer::step(LossClosure closure) {
  State& state = *state_of_shard_;
  if (state.options.overlap_with_ddp) return {};
  Join::notify_join_context(*this);
  copy_options(param_groups_, state.local->param_groups());
  bool in_closure = false;
  LossClosure watched;
  if (closure)
    watched = [&] {
      in_closure = true;
      auto loss = closure();
      in_closure = false;
      return loss;
    };
  at::Tensor loss;
  try {
    loss = state.local->step(std::move(watched));
  } catch (const std::exception& why) {
    state.owners.fail_step(why, in_closure);
    throw;
  }
  state.owners.share();
  return loss;
}

void ShardedOptimizer::consolidate_state_dict(int to) {
  State& state = *state_of_shard_;
  copy_options(param_groups_, state.local->param_groups());
  const Group& group = state.owners.group();
  const bool collects = group->rank() == to;
  auto all = group::gather_objects({.group = group}, {.global = {}, .local = to},
                                   collects ? static_cast<std::size_t>(group->size()) : 0,
                                   [&] { return group::ObjectBytes{saved(*state.local)}; });
  state.collected.clear();
  if (collects && all) state.collected = std::move(*all);
}

void ShardedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  const State& state = *state_of_shard_;
  if (state.collected.empty())
    group::invalid(
        "ZeroRedundancyOptimizer: the state has not been collected on this rank; call "
        "consolidate_state_dict(" +
        std::to_string(state.owners.group()->rank()) + ") on all ranks first");
  const auto whole = state.whole(param_groups_);
  for (std::size_t rank = 0; rank < state.collected.size(); ++rank) {
    const auto shard = state.make(state.part(param_groups_, static_cast<int>(rank)));
    load_into(*shard, state.collected[rank]);
    for (auto& [parameter, remembered] : shard->state())
      whole->state()[parameter] = std::move(remembered);
    copy_options(shard->param_groups(), whole->param_groups());
  }
  whole->save(archive);
}

void ShardedOptimizer::load(torch::serialize::InputArchive& archive) {
  State& state = *state_of_shard_;
  const auto whole = state.whole(param_groups_);
  whole->load(archive);
  copy_options(whole->param_groups(), param_groups_);
  state.local->state().clear();
  for (const auto& each : state.local->param_groups())
    for (const at::Tensor& parameter : each.params())
      if (const auto found = whole->state().find(parameter.unsafeGetTensorImpl());
          found != whole->state().end())
        state.local->state()[found->first] = std::move(found->second);
  state.collected.clear();
}

std::string ShardedOptimizer::state_dict() const { return saved(*this); }
void ShardedOptimizer::load_state_dict(const std::string& bytes) { load_into(*this, bytes); }

torch::optim::Optimizer& ShardedOptimizer::local() { return *state_of_shard_->local; }

int ShardedOptimizer::rank_of(const at::Tensor& parameter) const {
  return state_of_shard_->owners.rank_of(parameter);
}

// ---- join and overlap

std::unique_ptr<JoinHook> ShardedOptimizer::join_hook(const JoinOptions&) {
  // A rank without inputs must still update its parameters with the other ranks' gradients.
  struct ShadowHook : JoinHook {
    explicit ShadowHook(ShardedOptimizer& optimizer) : optimizer(optimizer) {}
    void main_hook() override {
      if (!optimizer.state_of_shard_->options.overlap_with_ddp) optimizer.step();
    }
    ShardedOptimizer& optimizer;
  };
  return std::make_unique<ShadowHook>(*this);
}

c10::Device ShardedOptimizer::join_device() const { return state_of_shard_->owners.device(); }
Group ShardedOptimizer::join_process_group() const { return state_of_shard_->owners.group(); }

CommHook hook_with_step(CommHook hook, ShardedOptimizer& optimizer) {
  if (!optimizer.state_of_shard_->options.overlap_with_ddp)
    group::invalid("hook_with_zero_step: make the ZeroRedundancyOptimizer with overlap_with_ddp");
  return [hook = std::move(hook),
          &optimizer](const GradBucket& bucket) -> std::function<at::Tensor()> {
    return [finish = hook(bucket), bucket, &optimizer] {
      return optimizer.state_of_shard_->step_bucket(optimizer.param_groups_, bucket, finish());
    };
  };
}

}  // namespace muster::parallel
