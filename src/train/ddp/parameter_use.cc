// SPDX-License-Identifier: BSD-3-Clause
#include "train/ddp/parameter_use.h"

#include "core/group/group_core.h"
#include "muster/collectives.h"

namespace muster::parallel {

ParameterUse::ParameterUse(std::size_t parameters, const ReducerOptions& options)
    : options_(options),
      mask_(at::zeros({static_cast<std::int64_t>(parameters)}, at::kInt)),
      static_counts_(parameters, 0) {}

void ParameterUse::begin_pass(const GradientHooks& hooks, std::span<const at::Tensor> outputs) {
  unused_.clear();
  unused_taken_ = false;
  if (options_.static_graph) {
    static_left_ = static_counts_;
    for (std::size_t i = 0; static_known_ && i < static_counts_.size(); ++i)
      if (static_counts_[i] == 0) unused_.push_back(i);
  } else if (options_.find_unused_parameters) {
    unused_ = hooks.unused_by(outputs, static_counts_.size());
  }
}

std::vector<std::size_t> ParameterUse::end_first_static_pass() {
  static_known_ = true;
  exchange_static_use();
  for (std::size_t i = 0; i < static_counts_.size(); ++i)
    if (static_counts_[i] == 0) static_order_.push_back(i);
  return static_order_;
}

void ParameterUse::exchange_static_use() {
  if (!static_use_.empty()) return;
  exchange(false);
  wait_for_exchange();
  for (std::size_t i = 0; i < static_counts_.size(); ++i) static_use_.push_back(has_gradient(i));
}

void ParameterUse::exchange(bool async) {
  exchanged_ = mask_.to(core_of(options_.group).exchange_device());
  // Off the CPU, the thread that waits may have another current stream than this one.
  async = async || !exchanged_.is_cpu();
  exchange_work_ = all_reduce(exchanged_, {.group = options_.group, .async_op = async});
}

void ParameterUse::wait_for_exchange() {
  if (exchange_work_) std::exchange(exchange_work_, nullptr)->wait();
  const auto sum = std::exchange(exchanged_, at::Tensor());
  if (sum.defined() && !sum.is_same(mask_)) mask_.copy_(sum);
}

bool ParameterUse::is_unused_everywhere(std::size_t index) const {
  if (options_.static_graph) return !static_use_[index];
  return is_exchanged() && !has_gradient(index);
}

}  // namespace muster::parallel
