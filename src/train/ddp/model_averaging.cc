// SPDX-License-Identifier: BSD-3-Clause
#include <torch/types.h>
#include <map>
#include <string>
#include <utility>

#include "core/group/errors.h"
#include "muster/collectives.h"
#include "muster/init.h"
#include "muster/model_averaging.h"
#include "muster/subgroups.h"

namespace muster {
void average_parameters(const std::vector<at::Tensor>& parameters, const Group& given) {
  const Group group = given ? given : default_group();
  if (!group->is_member()) return;
  const at::NoGradGuard no_grad;
  std::map<std::pair<at::ScalarType, std::string>, std::vector<at::Tensor>> kinds;
  for (const at::Tensor& parameter : parameters)
    if (parameter.grad().defined())
      kinds[{parameter.scalar_type(), parameter.device().str()}].push_back(parameter.detach());
  for (auto& [kind, tensors] : kinds) {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& tensor : tensors) parts.push_back(tensor.reshape({-1}));
    auto flat = at::cat(parts).div_(group->size());
    all_reduce(flat, {.group = group});
    std::int64_t at = 0;
    for (at::Tensor& tensor : tensors) {
      tensor.copy_(flat.narrow(0, at, tensor.numel()).view(tensor.sizes()));
      at += tensor.numel();
    }
  }
}

PeriodicModelAverager::PeriodicModelAverager(const Options& options) : options_(options) {
  if (options_.period < 1) group::invalid("PeriodicModelAverager: period must be at least 1");
  if (options_.warmup_steps < 0)
    group::invalid("PeriodicModelAverager: warmup_steps must not be negative");
  if (!options_.process_group) options_.process_group = default_group();
}

void PeriodicModelAverager::average_parameters(const std::vector<at::Tensor>& parameters) {
  const auto since = step_++ - options_.warmup_steps;
  if (since >= 0 && since % options_.period == 0)
    muster::average_parameters(parameters, options_.process_group);
}

void PeriodicModelAverager::average_parameters(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups())
    all.insert(all.end(), group.params().begin(), group.params().end());
  average_parameters(all);
}

PostLocalSGDState::PostLocalSGDState(const PostLocalSGDOptions& options) : options_(options) {
  if (options_.start_localSGD_iter < 0)
    group::invalid("post-local SGD: start_localSGD_iter must not be negative");
  if (options_.post_local_gradient_allreduce && !options_.subgroup)
    options_.subgroup = new_subgroups({}, {.group = options_.process_group}).first;
}

CommHook post_localSGD_hook(std::shared_ptr<PostLocalSGDState> state) {
  const auto& options = state->options();
  auto everybody = all_reduce_hook(options.process_group);
  auto nearby =
      options.post_local_gradient_allreduce ? all_reduce_hook(options.subgroup) : CommHook();
  return [state = std::move(state), everybody = std::move(everybody),
          nearby = std::move(nearby)](const GradBucket& bucket) -> std::function<at::Tensor()> {
    const bool together = state->iteration_ < state->options_.start_localSGD_iter;
    if (bucket.is_last) ++state->iteration_;
    if (together) return everybody(bucket);
    if (nearby) return nearby(bucket);
    return [buffer = bucket.buffer] { return buffer; };
  };
}

}  // namespace muster
