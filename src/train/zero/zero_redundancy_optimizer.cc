#include "muster/zero_redundancy_optimizer.h"

#include <c10/util/Exception.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>
#include <torch/types.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <sstream>
#include <tuple>
#include <unordered_map>

#include "core/group/call/exchange.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "muster/collectives.h"
#include "muster/init.h"
#include "muster/objects.h"
#include "train/modules/packed_broadcast.h"

namespace muster::parallel {

std::vector<std::vector<int>> shard_parameters(
    const std::vector<std::vector<std::int64_t>>& elements, int ranks) {
  std::vector<std::vector<int>> owners;
  std::vector<std::int64_t> loads(static_cast<std::size_t>(ranks), 0);
  for (const auto& group : elements) {
    std::vector<std::size_t> order(group.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return group[a] > group[b]; });
    std::vector<int> owner(group.size());
    for (const std::size_t index : order) {
      const auto least = std::min_element(loads.begin(), loads.end());
      *least += group[index];
      owner[index] = static_cast<int>(least - loads.begin());
    }
    owners.push_back(std::move(owner));
  }
  return owners;
}

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

std::string described(const ParamGroups& groups) {
  std::string text;
  for (std::size_t group = 0; group < groups.size(); ++group)
    for (std::size_t i = 0; i < groups[group].params().size(); ++i) {
      const at::Tensor& parameter = groups[group].params()[i];
      text += "parameter " + std::to_string(i) + " of group " + std::to_string(group) + ": " +
              c10::str(parameter.sizes()) + " " + c10::toString(parameter.scalar_type()) + "\n";
    }
  return text;
}

/// Throws on every rank if the ranks' parameters differ.
void compare(const Group& group, const std::string& mine) {
  const auto all = group::exchange_text(group, mine);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    std::istringstream ours(all[0]), theirs(all[rank]);
    std::string here, there;
    do {
      if (!std::getline(ours, here)) here = "nothing more";
      if (!std::getline(theirs, there)) there = "nothing more";
    } while (here == there);
    throw DistError("ZeroRedundancyOptimizer: the ranks' parameters differ: '" + here +
                        "' on rank " + std::to_string(group->global_rank_of(0)) + ", '" + there +
                        "' on rank " +
                        std::to_string(group->global_rank_of(static_cast<int>(rank))) +
                        "; give the same parameters on every rank",
                    Code::mismatch, {group->global_rank_of(static_cast<int>(rank))});
  }
}

void copy_options(const ParamGroups& from, ParamGroups& to) {
  for (std::size_t i = 0; i < from.size(); ++i) to[i].set_options(from[i].options().clone());
}

}  // namespace

// ---- state

struct ShardedOptimizer::State {
  struct Bucket {
    int owner = 0;
    at::Tensor memory;
    std::vector<at::Tensor> parameters;
    std::vector<at::Tensor> places;  // the parameters' locations in `memory`
  };

  Group group;
  MakeLocal make;
  ZeroRedundancyOptions options;
  std::unique_ptr<torch::optim::Optimizer> local;
  std::vector<std::vector<int>> owners;
  struct OwnedParameter {
    int owner = 0;
    at::ScalarType dtype = at::kFloat;
  };
  std::unordered_map<const void*, OwnedParameter> owner_of;  // by TensorImpl
  std::vector<Bucket> buckets;                               // with parameters_as_bucket_view
  std::vector<WorkRef> in_flight;                            // with overlap_with_ddp
  std::vector<std::string> collected;                        // serialised local optimizers by rank

  void divide(const ParamGroups& groups);
  OptimizerParamGroup part(const ParamGroups& groups, std::size_t group_index, int rank) const;
  ParamGroups parts(const ParamGroups& groups, int rank) const;
  void lay_out(const ParamGroups& groups);
  void restore_buckets();
  void share(const ParamGroups& groups);
  void send(const at::Tensor& tensor, int owner);
  void end_calls(const std::exception& why) const;
  void refuse_step(const std::exception& why) const;
  void wait_for_all();
  at::Tensor step_bucket(const ParamGroups& groups, const GradBucket& bucket, at::Tensor averaged);
  void step_only(const std::vector<at::Tensor>& parameters);
  std::unique_ptr<torch::optim::Optimizer> whole(const ParamGroups& groups) const;
};

void ShardedOptimizer::State::divide(const ParamGroups& groups) {
  std::vector<std::vector<std::int64_t>> elements;
  for (const auto& each : groups) {
    elements.emplace_back();
    for (const at::Tensor& parameter : each.params()) elements.back().push_back(parameter.numel());
  }
  owners = shard_parameters(elements, group->size());
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (std::size_t i = 0; i < groups[g].params().size(); ++i)
      owner_of[groups[g].params()[i].unsafeGetTensorImpl()] = {owners[g][i],
                                                               groups[g].params()[i].scalar_type()};
}

OptimizerParamGroup ShardedOptimizer::State::part(const ParamGroups& groups,
                                                  std::size_t group_index, int rank) const {
  std::vector<at::Tensor> mine;
  const auto& all = groups[group_index].params();
  for (std::size_t i = 0; i < all.size(); ++i)
    if (owners[group_index][i] == rank) mine.push_back(all[i]);
  return {std::move(mine), groups[group_index].options().clone()};
}

ParamGroups ShardedOptimizer::State::parts(const ParamGroups& groups, int rank) const {
  ParamGroups mine;
  for (std::size_t g = 0; g < groups.size(); ++g) mine.push_back(part(groups, g, rank));
  return mine;
}

/// Moves the parameters into one allocation per rank, dtype and device.
void ShardedOptimizer::State::lay_out(const ParamGroups& groups) {
  const at::NoGradGuard no_grad;
  std::map<std::tuple<int, int, std::string>, std::vector<at::Tensor>> kinds;
  for (const auto& each : groups)
    for (const at::Tensor& parameter : each.params())
      kinds[{owner_of.at(parameter.unsafeGetTensorImpl()).owner,
             static_cast<int>(parameter.scalar_type()), parameter.device().str()}]
          .push_back(parameter);
  buckets.clear();
  for (const auto& [kind, parameters] : kinds) {
    std::int64_t elements = 0;
    for (const at::Tensor& parameter : parameters) elements += parameter.numel();
    Bucket bucket{std::get<0>(kind),
                  flat_memory(elements, parameters.front().options().requires_grad(false)),
                  parameters,
                  {}};
    std::int64_t at = 0;
    for (const at::Tensor& parameter : parameters) {
      bucket.places.push_back(shaped_like(bucket.memory, at, parameter));
      at += parameter.numel();
    }
    buckets.push_back(std::move(bucket));
  }
  restore_buckets();
}

/// Moves parameters with other memory (initially, and after torch::load, which replaces it) into
/// the buckets.
void ShardedOptimizer::State::restore_buckets() {
  const at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets)
    for (std::size_t i = 0; i < bucket.parameters.size(); ++i) {
      if (bucket.parameters[i].const_data_ptr() == bucket.places[i].const_data_ptr()) continue;
      bucket.places[i].copy_(bucket.parameters[i].detach());
      bucket.parameters[i].set_data(bucket.places[i]);
    }
}

void ShardedOptimizer::State::send(const at::Tensor& tensor, int owner) {
  if (tensor.numel() > 0)
    in_flight.push_back(broadcast(tensor, {.group = group, .async_op = true, .group_src = owner}));
}

/// Aborts the group, because other ranks would wait for parameters this rank will not send.
void ShardedOptimizer::State::end_calls(const std::exception& why) const {
  if (!group->failure().ok()) return;
  const auto* of_torch = dynamic_cast<const c10::Error*>(&why);
  const std::string reason = of_torch != nullptr ? of_torch->what_without_backtrace() : why.what();
  core_of(group).abort("the step of a ZeroRedundancyOptimizer failed on rank " +
                       std::to_string(core_of(group).first_rank_of(group->rank())) + ": " + reason);
}

/// As end_calls, if the other ranks may have failed alike: then the group stays usable.
void ShardedOptimizer::State::refuse_step(const std::exception& why) const {
  if (!group->failure().ok()) return;
  try {
    core_of(group).refuse(Op::broadcast, "ZeroRedundancyOptimizer", why);
  } catch (const DistError&) {
    // The caller rethrows the original error.
  }
}

void ShardedOptimizer::State::wait_for_all() {
  for (const WorkRef& work : std::exchange(in_flight, {})) work->wait();
}

void ShardedOptimizer::State::share(const ParamGroups& groups) {
  if (options.parameters_as_bucket_view) {
    restore_buckets();
    for (const Bucket& bucket : buckets) send(bucket.memory, bucket.owner);
  } else {
    for (std::size_t g = 0; g < groups.size(); ++g)
      for (std::size_t i = 0; i < groups[g].params().size(); ++i)
        send(groups[g].params()[i].detach(), owners[g][i]);
  }
  wait_for_all();
}

/// Steps one averaged bucket, on autograd's thread. DDP sets the gradients afterwards; until then
/// they are in the bucket. Returns the averages.
at::Tensor ShardedOptimizer::State::step_bucket(const ParamGroups& groups, const GradBucket& bucket,
                                                at::Tensor averaged) {
  const at::NoGradGuard no_grad;
  const bool sparse = bucket.buffer.is_sparse();
  if (!sparse && !averaged.is_same(bucket.buffer))
    averaged = at::Tensor(bucket.buffer).copy_(averaged.view({-1}));
  std::vector<at::Tensor> mine, gradients_before;
  std::vector<std::pair<at::Tensor, int>> updated;
  for (std::size_t i = 0; i < bucket.parameters.size(); ++i) {
    at::Tensor parameter = bucket.parameters[i];
    const auto found = owner_of.find(parameter.unsafeGetTensorImpl());
    if (found == owner_of.end()) continue;
    const at::ScalarType dtype = found->second.dtype;
    if (averaged.scalar_type() != c10::toRealValueType(dtype) || parameter.scalar_type() != dtype)
      group::invalid(
          "ZeroRedundancyOptimizer: with mixed_precision the parameters are not themselves inside "
          "backward: leave overlap_with_ddp out and "
          "call step() after it");
    updated.emplace_back(parameter, found->second.owner);
    if (found->second.owner != group->rank()) continue;
    mine.push_back(parameter);
    const at::Tensor& gradient = sparse ? averaged : bucket.gradients[i];
    gradients_before.push_back(
        std::exchange(parameter.mutable_grad(),
                      c10::isComplexType(dtype) ? at::view_as_complex(gradient) : gradient));
  }
  copy_options(groups, local->param_groups());
  try {
    step_only(mine);
  } catch (const std::exception& why) {
    end_calls(why);
    throw;
  }
  for (std::size_t i = 0; i < mine.size(); ++i) mine[i].mutable_grad() = gradients_before[i];
  for (const auto& [parameter, owner] : updated) send(parameter.detach(), owner);
  if (bucket.is_last) wait_for_all();
  return averaged;
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
    : Optimizer(param_groups, std::move(defaults)), state_of_shard_(std::make_unique<State>()) {
  State& state = *state_of_shard_;
  state.group = options.process_group ? options.process_group : default_group();
  state.make = std::move(make);
  state.options = options;
  if (!state.group->is_member())
    group::invalid("ZeroRedundancyOptimizer: this rank is not a member of process_group");
  compare(state.group, described(param_groups_));
  if (std::all_of(param_groups_.begin(), param_groups_.end(),
                  [](const auto& each) { return each.params().empty(); }))
    group::invalid("ZeroRedundancyOptimizer: there are no parameters");
  for (const auto& each : param_groups_)
    for (const at::Tensor& parameter : each.params())
      if (parameter.layout() != at::kStrided)
        group::invalid(
            "ZeroRedundancyOptimizer: a parameter is sparse; only dense ones can be divided");
  state.divide(param_groups_);
  state.local = state.make(state.parts(param_groups_, state.group->rank()));
  if (options.parameters_as_bucket_view) state.lay_out(param_groups_);
}

ShardedOptimizer::~ShardedOptimizer() = default;

void ShardedOptimizer::add_param_group(const OptimizerParamGroup& param_group) {
  State& state = *state_of_shard_;
  Optimizer::add_param_group(param_group);
  compare(state.group, described(param_groups_));
  state.divide(param_groups_);
  state.local->add_param_group(
      state.part(param_groups_, param_groups_.size() - 1, state.group->rank()));
  if (state.options.parameters_as_bucket_view) state.lay_out(param_groups_);
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
    in_closure ? state.refuse_step(why) : state.end_calls(why);
    throw;
  }
  const at::NoGradGuard no_grad;
  state.share(param_groups_);
  return loss;
}

void ShardedOptimizer::consolidate_state_dict(int to) {
  State& state = *state_of_shard_;
  copy_options(param_groups_, state.local->param_groups());
  const bool collects = state.group->rank() == to;
  auto all = group::gather_objects({.group = state.group}, {.global = {}, .local = to},
                                   collects ? static_cast<std::size_t>(state.group->size()) : 0,
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
        std::to_string(state.group->rank()) + ") on all ranks first");
  const auto whole = state.whole(param_groups_);
  for (int rank = 0; rank < state.group->size(); ++rank) {
    const auto shard = state.make(state.parts(param_groups_, rank));
    load_into(*shard, state.collected[static_cast<std::size_t>(rank)]);
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
  const auto& owner_of = state_of_shard_->owner_of;
  const auto found = owner_of.find(parameter.unsafeGetTensorImpl());
  if (found == owner_of.end())
    group::invalid("ZeroRedundancyOptimizer: this tensor is none of its parameters");
  return found->second.owner;
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

c10::Device ShardedOptimizer::join_device() const {
  return param_groups_.front().params().front().device();
}
Group ShardedOptimizer::join_process_group() const { return state_of_shard_->group; }

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
