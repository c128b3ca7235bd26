// SPDX-License-Identifier: BSD-3-Clause
#include "train/ddp/reducer/reducer.h"

#include <torch/csrc/autograd/function_hook.h>

#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "muster/collectives.h"
#include "train/ddp/reducer/reducer_state.h"

namespace muster::parallel {
namespace {

const std::string kEarlierFailure =
    "an earlier reduction of the gradients failed, and this model cannot go on: ";

}  // namespace

struct Reducer::State::Hook final : torch::autograd::FunctionPostHook {
  Hook(std::weak_ptr<State> state, std::size_t index) : state(std::move(state)), index(index) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    const auto alive = state.lock();
    if (!alive) return outputs;
    try {
      index == kRelease ? alive->release() : alive->on_gradient(index, inputs);
    } catch (...) {
      alive->rethrow();
    }
    return outputs;
  }
  static constexpr std::size_t kRelease = SIZE_MAX;
  std::weak_ptr<State> state;
  std::size_t index;
};

Reducer::State::State(std::vector<at::Tensor> parameters, ReducerOptions given)
    : options(std::move(given)),
      layout(std::move(parameters), options,
             core_of(options.group).parts().backends.front().second->capabilities().scaled_sums),
      use(layout.size(), options),
      copies(layout, use, options) {
  pass.ready.assign(layout.size(), false);
  share_in_place_gradients();
}

/// Lets autograd allocate gradients that are reduced in place in shared memory.
void Reducer::State::share_in_place_gradients() {
  if (core_of(options.group).shares_memory()) shared_sizes.emplace(layout.in_place_sizes());
}

void Reducer::State::attach() {
  std::vector<at::Tensor> leaves = layout.parameters();
  if (options.held_until.defined()) leaves.push_back(options.held_until);
  hooks = std::make_unique<GradientHooks>(
      std::move(leaves), [state = weak_from_this(), count = layout.size()](std::size_t index) {
        return std::make_unique<Hook>(state, index < count ? index : Hook::kRelease);
      });
}

// ---- before backward

void Reducer::State::check_finished() const {
  if (failure) {
    try {
      std::rethrow_exception(failure);
    } catch (const DistError& error) {
      throw DistBackendError(kEarlierFailure + error.what(), error.code(), error.ranks());
    } catch (const std::exception& error) {
      throw DistBackendError(kEarlierFailure + error.what(), Code::aborted,
                             {options.group->rank()});
    }
  }
  if (!pass.in_flight) return;
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < pass.ready.size(); ++i)
    if (!pass.ready[i]) missing.push_back(i);
  const std::string rank = std::to_string(options.group->rank());
  std::string indices;
  for (const std::size_t index : missing) {
    if (!indices.empty()) indices += ' ';
    indices += std::to_string(index);
  }
  throw DistError(
      "Expected to have finished reduction in the prior iteration before starting a new one. This "
      "error indicates that your module has parameters that were not used in producing loss. You "
      "can enable unused parameter detection by passing the keyword argument "
      "`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and by making "
      "sure all `forward` function outputs participate in calculating loss. If you already have "
      "done the above, then the distributed data parallel module wasn't able to locate the output "
      "tensors in the return value of your module's `forward` function. Please include the loss "
      "function and the structure of the return value of `forward` of your module when reporting "
      "this issue (e.g. list, dict, iterable).\nParameters which did not receive grad for rank " +
          rank + ": " + layout.names_of(missing) +
          "\nParameter indices which did not receive grad for rank " + rank + ": " + indices,
      Code::invalid_argument, {options.group->rank()});
}

/// All ranks adopt rank 0's order of arrival.
void Reducer::State::rebuild() {
  is_rebuilt = true;
  auto order = torch::tensor(std::vector<std::int64_t>(arrived.begin(), arrived.end()), at::kLong)
                   .to(core_of(options.group).exchange_device());
  broadcast(order, {.group = options.group, .group_src = 0});
  order = order.cpu();
  const auto* first = order.const_data_ptr<std::int64_t>();
  layout.lay_out_by(std::vector<std::size_t>(first, first + order.numel()));
  share_in_place_gradients();
}

void Reducer::State::arm(std::span<const at::Tensor> outputs) {
  pass.mode = Pass::PassMode::reduce;
  pass.next = 0;
  pass.released = false;
  pass.sequential = false;
  pass.ready.assign(layout.size(), false);
  copies.begin_pass();
  timing.times.backward_start = steady_clock().now();
  use.begin_pass(*hooks, outputs);
}

/// Notifies the reducer of a backward pass before its first gradient. Leaves are skipped, because
/// they would keep their hooks for ever.
void Reducer::State::watch_backward(std::span<const at::Tensor> outputs) {
  pass.end_queued = false;
  pass.has_gradients = false;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad() || output.is_leaf()) continue;
    output.register_hook([state = weak_from_this()](const at::Tensor&) {
      const auto alive = state.lock();
      if (!alive) return;
      const std::lock_guard lock(alive->mutex);
      alive->begin_backward();
    });
  }
}

// ---- the face

Reducer::Reducer(std::vector<at::Tensor> parameters, ReducerOptions options) {
  if (!options.group || !options.group->is_member())
    group::invalid("a reducer needs a group that this rank is a member of");
  if (parameters.empty())
    group::invalid(
        "there is nothing to average: the module has no parameter that requires a gradient");
  state_ = std::make_shared<State>(std::move(parameters), std::move(options));
  state_->attach();
}

Reducer::~Reducer() {
  state_->hooks->detach();
  std::exception_ptr refused;
  {
    const std::lock_guard lock(state_->mutex);
    refused = state_->refused;
    if (refused) state_->failure = refused;
  }
  if (refused) state_->abort_group(refused);
}

void Reducer::check_finished() const {
  const std::lock_guard lock(state_->mutex);
  state_->check_finished();
}

void Reducer::prepare_forward() {
  const std::lock_guard lock(state_->mutex);
  state_->check_finished();
  state_->refused = nullptr;
  state_->hooks->reattach_if_changed();
  ++state_->timing.iteration;
  state_->timing.times.forward_start = steady_clock().now();
  if (!state_->is_rebuilt && state_->arrived.size() == state_->layout.size()) state_->rebuild();
}

void Reducer::prepare_backward(std::span<const at::Tensor> outputs) {
  const std::lock_guard lock(state_->mutex);
  state_->arm(outputs);
  state_->watch_backward(outputs);
}

void Reducer::skip_backward(std::span<const at::Tensor> outputs) {
  const std::lock_guard lock(state_->mutex);
  state_->pass.mode = State::Pass::PassMode::local;
  state_->watch_backward(outputs);
}

void Reducer::shadow_backward() {
  const std::lock_guard lock(state_->mutex);
  state_->shadow();
}

void Reducer::set_divisor(int ranks) {
  const std::lock_guard lock(state_->mutex);
  state_->copies.set_divisor(ranks);
}

void Reducer::reattach_hooks() {
  const std::lock_guard lock(state_->mutex);
  state_->hooks->reattach();
}

void Reducer::set_hook(CommHook hook) {
  const std::lock_guard lock(state_->mutex);
  if (state_->hook) group::invalid("a communication hook was registered before; a model takes one");
  if (state_->pass.in_flight || !state_->arrived.empty())
    group::invalid("register the communication hook before the first backward pass");
  state_->hook = std::move(hook);
  state_->copies.set_hooked();
  state_->layout.set_hooked();
  state_->share_in_place_gradients();
}

void Reducer::set_sample_rate(int iterations) {
  const std::lock_guard lock(state_->mutex);
  if (iterations < 1) group::invalid("the sample rate is a number of iterations, at least 1");
  state_->timing.statistics.set_sample_rate(iterations);
}

std::vector<std::int64_t> Reducer::bucket_bytes() const {
  const std::lock_guard lock(state_->mutex);
  return state_->layout.bucket_bytes();
}

std::size_t Reducer::in_place() const {
  const std::lock_guard lock(state_->mutex);
  return state_->copies.in_place();
}

bool Reducer::is_idle() const {
  const std::lock_guard lock(state_->mutex);
  return !state_->pass.in_flight && !state_->failure && !state_->refused;
}

bool Reducer::rebuilt() const {
  const std::lock_guard lock(state_->mutex);
  return state_->is_rebuilt;
}

}  // namespace muster::parallel
