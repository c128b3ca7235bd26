// SPDX-License-Identifier: BSD-3-Clause
#include "muster/local_sgd.h"

#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include <cstring>
#include <iterator>
#include <sstream>
#include <string>
#include <unordered_set>
#include <utility>

#include "core/group/errors.h"

namespace muster {
namespace {

using Tensors = std::vector<at::Tensor>;

parallel::ReplicaMeetings::MeetingSchedule schedule_of(const LocalSgdOptions& options) {
  return {.name = "LocalSgd",
          .group = options.group,
          .sync_every = options.sync_every,
          .delay = 0,
          .sync_period = options.sync_period,
          .by_tokens = options.by_tokens,
          .mix = 0,
          .compression = options.compression,
          .error_feedback = options.error_feedback,
          .joins = options.joins};
}
parallel::ReplicaMeetings::MeetingSchedule schedule_of(const DiLoCoOptions& options) {
  return {.name = "DiLoCo",
          .group = options.group,
          .sync_every = options.sync_every,
          .delay = options.delay,
          .sync_period = options.sync_period,
          .by_tokens = options.by_tokens,
          .mix = options.mix,
          .compression = options.compression,
          .error_feedback = options.error_feedback,
          .joins = options.joins};
}

}  // namespace

std::vector<std::vector<at::Tensor>> fragments_of(const torch::nn::Module& module, int count) {
  if (count < 1) group::invalid("fragments_of: count must be at least 1");
  std::vector<Tensors> fragments(static_cast<std::size_t>(count));
  std::unordered_set<const void*> seen;
  std::size_t layers = 0;
  for (const auto& part : module.modules()) {
    Tensors own;
    for (const at::Tensor& parameter : part->parameters(/*recurse=*/false))
      if (parameter.defined() && seen.insert(parameter.unsafeGetTensorImpl()).second)
        own.push_back(parameter);
    if (own.empty()) continue;
    Tensors& fragment = fragments[layers++ % fragments.size()];
    fragment.insert(fragment.end(), own.begin(), own.end());
  }
  if (layers < fragments.size())
    group::invalid("fragments_of: the module has " + std::to_string(layers) +
                   " layers with parameters, which make no " + std::to_string(count) +
                   " fragments; give a smaller count");
  return fragments;
}

LocalSgd::LocalSgd(std::vector<at::Tensor> parameters, const LocalSgdOptions& options)
    : meetings_(std::vector<Tensors>{std::move(parameters)}, schedule_of(options)) {
  meetings_.set_update([this] {
    for (const at::Tensor& outer : meetings_.outer_parameters())
      if (outer.grad().defined()) outer.sub_(outer.grad());
  });
  meetings_.enter();
}

DiLoCo::DiLoCo(std::vector<std::vector<at::Tensor>> fragments, const DiLoCoOptions& options)
    : meetings_(std::move(fragments), schedule_of(options)) {
  const auto& outer = meetings_.outer_parameters();
  outer_optimizer_ = options.outer_optimizer
                         ? options.outer_optimizer(outer)
                         : std::make_unique<torch::optim::SGD>(
                               outer, torch::optim::SGDOptions(0.7).momentum(0.9).nesterov(true));
  meetings_.set_update([optimizer = outer_optimizer_.get()] { optimizer->step(); });
  share_optimizer();
  meetings_.enter();
}

void DiLoCo::share_optimizer() {
  meetings_.share_optimizer(
      [this] {
        std::ostringstream out;
        torch::save(*outer_optimizer_, out);
        const std::string bytes = out.str();
        at::Tensor tensor = at::empty({std::ssize(bytes)}, at::kByte);
        std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
        return tensor;
      },
      [this](const at::Tensor& bytes) {
        std::istringstream in(std::string(static_cast<const char*>(bytes.const_data_ptr()),
                                          static_cast<std::size_t>(bytes.numel())));
        torch::load(*outer_optimizer_, in);
      });
}

void DiLoCo::set_group(const Group& group) {
  meetings_.set_group(group);
  share_optimizer();
}

}  // namespace muster
