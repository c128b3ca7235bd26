// SPDX-License-Identifier: BSD-3-Clause
#include "train/zero/parameter_owners.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/view_as_complex.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <sstream>
#include <tuple>
#include <utility>

#include "core/group/call/exchange.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "muster/collectives.h"
#include "muster/zero_redundancy_optimizer.h"
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

ParameterOwners::ParameterOwners(Group group, bool in_buckets, NameOfDtype name_of_dtype)
    : group_(std::move(group)), in_buckets_(in_buckets), name_of_dtype_(std::move(name_of_dtype)) {}

// ---- the division

void ParameterOwners::compare(const Groups& groups) const {
  std::string mine;
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (std::size_t i = 0; i < groups[g].size(); ++i)
      mine += "parameter " + std::to_string(i) + " of group " + std::to_string(g) + ": " +
              c10::str(groups[g][i].sizes()) + " " + name_of_dtype_(groups[g][i].scalar_type()) +
              "\n";
  const auto all = group::exchange_text(group_, mine);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    std::istringstream ours(all[0]), theirs(all[rank]);
    std::string here, there;
    do {
      if (!std::getline(ours, here)) here = "nothing more";
      if (!std::getline(theirs, there)) there = "nothing more";
    } while (here == there);
    const int other = group_->global_rank_of(static_cast<int>(rank));
    throw DistError("ZeroRedundancyOptimizer: the ranks' parameters differ: '" + here +
                        "' on rank " + std::to_string(group_->global_rank_of(0)) + ", '" + there +
                        "' on rank " + std::to_string(other) +
                        "; give the same parameters on every rank",
                    Code::mismatch, {other});
  }
  if (mine.empty()) group::invalid("ZeroRedundancyOptimizer: there are no parameters");
}

void ParameterOwners::divide(Groups groups, int ranks) {
  std::vector<std::vector<std::int64_t>> elements;
  for (const auto& each : groups) {
    elements.emplace_back();
    for (const at::Tensor& parameter : each) {
      if (parameter.layout() != at::kStrided)
        group::invalid(
            "ZeroRedundancyOptimizer: a parameter is sparse; only dense ones can be divided");
      elements.back().push_back(parameter.numel());
    }
  }
  owners_ = shard_parameters(elements, ranks);
  groups_ = std::move(groups);
  owned_.clear();
  index_.clear();
  for (std::size_t g = 0; g < groups_.size(); ++g)
    for (std::size_t i = 0; i < groups_[g].size(); ++i) {
      const at::Tensor& parameter = groups_[g][i];
      const auto [at, is_new] = index_.try_emplace(parameter.unsafeGetTensorImpl(), owned_.size());
      if (is_new) owned_.push_back({parameter, 0, parameter.scalar_type()});
      owned_[at->second].owner = owners_[g][i];
    }
  if (in_buckets_) lay_out();
}

ParameterOwners::Groups ParameterOwners::part_of(int rank) const {
  Groups part(groups_.size());
  for (std::size_t g = 0; g < groups_.size(); ++g)
    for (std::size_t i = 0; i < groups_[g].size(); ++i)
      if (owners_[g][i] == rank) part[g].push_back(groups_[g][i]);
  return part;
}

std::vector<std::int64_t> ParameterOwners::numbers_of(int rank) const {
  std::vector<std::int64_t> numbers;
  std::int64_t number = 0;
  for (const auto& group : owners_)
    for (const int owner : group) {
      if (owner == rank) numbers.push_back(number);
      ++number;
    }
  return numbers;
}

int ParameterOwners::rank_of(const at::Tensor& parameter) const {
  const auto found = index_.find(parameter.unsafeGetTensorImpl());
  if (found == index_.end())
    group::invalid("ZeroRedundancyOptimizer: this tensor is none of its parameters");
  return owned_[found->second].owner;
}

// ---- buckets

/// Moves the parameters into one allocation per rank, dtype and device.
void ParameterOwners::lay_out() {
  const at::NoGradGuard no_grad;
  std::map<std::tuple<int, int, std::string>, std::vector<at::Tensor>> kinds;
  for (const OwnedParameter& each : owned_)
    kinds[{each.owner, static_cast<int>(each.dtype), each.parameter.device().str()}].push_back(
        each.parameter);
  buckets_.clear();
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
    buckets_.push_back(std::move(bucket));
  }
  restore_buckets();
}

/// Moves parameters with other memory (initially, and after torch::load, which replaces it) into
/// the buckets.
void ParameterOwners::restore_buckets() {
  const at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets_)
    for (std::size_t i = 0; i < bucket.parameters.size(); ++i) {
      if (bucket.parameters[i].const_data_ptr() == bucket.places[i].const_data_ptr()) continue;
      bucket.places[i].copy_(bucket.parameters[i].detach());
      bucket.parameters[i].set_data(bucket.places[i]);
    }
}

// ---- the exchange

void ParameterOwners::send(const at::Tensor& tensor, int owner) {
  if (tensor.numel() > 0)
    in_flight_.push_back(
        broadcast(tensor, {.group = group_, .async_op = true, .group_src = owner}));
}

void ParameterOwners::wait_for_all() {
  for (const WorkRef& work : std::exchange(in_flight_, {})) work->wait();
}

void ParameterOwners::share() {
  const at::NoGradGuard no_grad;
  restore_buckets();
  for (const Bucket& bucket : buckets_) send(bucket.memory, bucket.owner);
  if (!in_buckets_)
    for (const OwnedParameter& each : owned_) send(each.parameter.detach(), each.owner);
  wait_for_all();
}

void ParameterOwners::fail_step(const std::exception& why, bool in_closure) const {
  if (!group_->failure().ok()) return;
  GroupCore& core = core_of(group_);
  if (in_closure) {
    try {
      core.refuse(Op::broadcast, "ZeroRedundancyOptimizer", why);
    } catch (const DistError&) {
      return;  // The caller rethrows the original error.
    }
  }
  const auto* of_torch = dynamic_cast<const c10::Error*>(&why);
  const std::string reason = of_torch != nullptr ? of_torch->what_without_backtrace() : why.what();
  core.abort("the step of a ZeroRedundancyOptimizer failed on rank " +
             std::to_string(core.first_rank_of(group_->rank())) + ": " + reason);
}

// ---- within backward

std::vector<at::Tensor> ParameterOwners::begin_bucket(const GradBucket& bucket,
                                                      at::Tensor averaged) {
  const at::NoGradGuard no_grad;
  const bool sparse = bucket.buffer.is_sparse();
  if (!sparse && !averaged.is_same(bucket.buffer))
    averaged = at::Tensor(bucket.buffer).copy_(averaged.view({-1}));
  step_ = {.averaged = std::move(averaged), .is_last = bucket.is_last};
  for (std::size_t i = 0; i < bucket.parameters.size(); ++i) {
    at::Tensor parameter = bucket.parameters[i];
    const auto found = index_.find(parameter.unsafeGetTensorImpl());
    if (found == index_.end()) continue;
    const OwnedParameter& owned = owned_[found->second];
    if (step_.averaged.scalar_type() != c10::toRealValueType(owned.dtype) ||
        parameter.scalar_type() != owned.dtype)
      group::invalid(
          "ZeroRedundancyOptimizer: with mixed_precision the parameters are not themselves inside "
          "backward: leave overlap_with_ddp out and call step() after it");
    step_.updated.push_back(owned);
    if (owned.owner != group_->rank()) continue;
    step_.mine.push_back(parameter);
    const at::Tensor& gradient = sparse ? step_.averaged : bucket.gradients[i];
    step_.gradients_before.push_back(
        std::exchange(parameter.mutable_grad(),
                      c10::isComplexType(owned.dtype) ? at::view_as_complex(gradient) : gradient));
  }
  return step_.mine;
}

at::Tensor ParameterOwners::end_bucket() {
  const at::NoGradGuard no_grad;
  BucketStep step = std::exchange(step_, {});
  for (std::size_t i = 0; i < step.mine.size(); ++i)
    step.mine[i].mutable_grad() = step.gradients_before[i];
  for (const OwnedParameter& each : step.updated) send(each.parameter.detach(), each.owner);
  if (step.is_last) wait_for_all();
  return step.averaged;
}

}  // namespace muster::parallel
