#include "muster/parallel/reducer.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>
#include <numeric>
#include <unordered_set>

#include "muster/group/collectives.h"
#include "muster/group/errors.h"
#include "muster/parallel/flat_memory.h"
#include "muster/parallel/reducer_state.h"

namespace muster::parallel {
namespace {

const std::string kFailedBefore =
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
      alive->leave_backward();
    }
    return outputs;
  }
  static constexpr std::size_t kRelease = SIZE_MAX;
  std::weak_ptr<State> state;
  std::size_t index;
};

Reducer::State::State(std::vector<at::Tensor> given_parameters, ReducerOptions given)
    : parameters(std::move(given_parameters)),
      options(std::move(given)),
      divisor(options.group->size()) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    if (!parameter.defined() || !parameter.requires_grad() || !parameter.is_leaf())
      group::invalid("a reducer's parameters must be leaves that require gradients; " + name(i) +
                     " is not");
  }
  ready.assign(parameters.size(), false);
  static_counts.assign(parameters.size(), 0);
  used = at::zeros({static_cast<std::int64_t>(parameters.size())}, at::kInt);
  any_operation = options.group->parts().backends.front().second->takes_plain();
  lay_out_first();
}

void Reducer::State::attach() {
  // A parameter that is frozen for now has no accumulator.
  const auto hook_on = [this](const at::Tensor& leaf, std::size_t index) {
    accumulators.push_back(torch::autograd::impl::grad_accumulator(leaf));
    const NodeRef& node = accumulators.back();
    hook_keys.push_back(node ? node->add_post_hook(std::make_unique<Hook>(weak_from_this(), index))
                             : 0);
  };
  for (std::size_t i = 0; i < parameters.size(); ++i) hook_on(parameters[i], i);
  if (options.held_until.defined()) hook_on(options.held_until, Hook::kRelease);
}

/// After torch::load, which gives a parameter other memory, and where one was frozen or is trained
/// again, autograd knows the parameter anew, without our hook.
void Reducer::State::attach_anew() {
  for (std::size_t i = 0; i < accumulators.size(); ++i) {
    const at::Tensor& leaf = i < parameters.size() ? parameters[i] : options.held_until;
    if (torch::autograd::impl::grad_accumulator(leaf) == accumulators[i]) continue;
    detach();
    attach();
    return;
  }
}

void Reducer::State::detach() {
  for (std::size_t i = 0; i < accumulators.size(); ++i)
    if (accumulators[i]) accumulators[i]->del_post_hook(hook_keys[i]);
  accumulators.clear();
  hook_keys.clear();
}

std::string Reducer::State::name(std::size_t index) const {
  return index < options.names.size() ? options.names[index] : "parameter " + std::to_string(index);
}

std::string Reducer::State::names_of(const std::vector<std::size_t>& indices) const {
  std::string text;
  for (const std::size_t index : indices) {
    if (!text.empty()) text += ", ";
    text += name(index);
  }
  return text;
}

// ---- buckets
// ---------------------------------------------------------------------------------------------------------

std::vector<ParameterFacts> Reducer::State::facts() const {
  std::vector<ParameterFacts> all;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::ScalarType dtype = travels_as(parameters[i]);
    all.push_back(
        {.bytes = parameters[i].numel() * static_cast<std::int64_t>(c10::elementSize(dtype)),
         .dtype = dtype,
         .device = parameters[i].device(),
         .alone = is_sparse(i) || goes_alone(parameters[i])});
  }
  return all;
}

void Reducer::State::lay_out(const std::vector<BucketIndices>& plan) {
  const at::NoGradGuard no_grad;
  std::vector<Bucket> made;
  std::vector<std::size_t> alone;
  places.assign(parameters.size(), {});
  for (const BucketIndices& indices : plan) {
    Bucket bucket;
    bucket.indices = indices;
    bucket.sparse = is_sparse(indices.front());
    bucket.pending = indices.size();
    if (bucket.sparse) {
      places[indices.front()] = {made.size(), 0};
      made.push_back(std::move(bucket));
      continue;
    }
    for (std::size_t slot = 0; slot < indices.size(); ++slot)
      places[indices[slot]] = {made.size(), slot};
    bucket.dtype = travels_as(parameters[indices.front()]);
    bucket.alone = goes_alone(parameters[indices.front()]);
    if (bucket.alone) {
      alone.push_back(parameters[indices.front()].nbytes());
    } else {
      give_memory(bucket);
    }
    made.push_back(std::move(bucket));
  }
  buckets = std::move(made);
  if (options.group->shares_memory()) shared_sizes.emplace(std::move(alone));
}

void Reducer::State::give_memory(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  std::int64_t elements = 0;
  for (const std::size_t index : bucket.indices) elements += parameters[index].numel();
  const auto of_gradients =
      parameters[bucket.indices.front()].options().requires_grad(false).dtype(bucket.dtype);
  const std::int64_t parts = c10::isComplexType(bucket.dtype) ? 2 : 1;
  bucket.memory =
      flat_memory(elements * parts, of_gradients.dtype(c10::toRealValueType(bucket.dtype)));
  const at::Tensor gradients =
      at::empty({0}, of_gradients).set_(bucket.memory.storage(), 0, {elements}, {1});
  std::int64_t at = 0;
  for (const std::size_t index : bucket.indices) {
    bucket.views.push_back(shaped_like(gradients, at, parameters[index]));
    at += parameters[index].numel();
    at::Tensor& gradient = parameters[index].mutable_grad();
    if (options.gradient_as_bucket_view && gradient.defined()) {
      bucket.views.back().copy_(gradient.detach());
      gradient = bucket.views.back();
    }
  }
}

void Reducer::State::lay_out_first() {
  std::vector<std::size_t> order(parameters.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  // Where the first pass will tell the order, it may as well run with as few buckets as possible.
  const bool will_rebuild = options.static_graph || !options.find_unused_parameters;
  auto plan = will_rebuild ? plan_buckets(facts(), order, INT64_MAX, INT64_MAX)
                           : plan_buckets(facts(), order, options.first_bucket_bytes,
                                          options.bucket_cap_bytes);
  // Gradients come last parameter first, so a bucket is complete with the one of its first
  // parameter.
  const auto first_of = [](const BucketIndices& indices) {
    return *std::min_element(indices.begin(), indices.end());
  };
  std::stable_sort(plan.begin(), plan.end(),
                   [&](const auto& a, const auto& b) { return first_of(a) > first_of(b); });
  lay_out(plan);
}

/// Rank 0's order of arrival becomes everybody's.
void Reducer::State::rebuild() {
  has_rebuilt = true;
  auto order = torch::tensor(std::vector<std::int64_t>(arrived.begin(), arrived.end()), at::kLong);
  broadcast(order, {.group = options.group, .group_src = 0});
  const auto* first = order.const_data_ptr<std::int64_t>();
  lay_out(plan_buckets(facts(), std::vector<std::size_t>(first, first + order.numel()),
                       options.first_bucket_bytes, options.bucket_cap_bytes));
}

// ---- before backward
// -------------------------------------------------------------------------------------------------

void Reducer::State::check_finished() const {
  if (failure) {
    try {
      std::rethrow_exception(failure);
    } catch (const DistError& error) {
      throw DistBackendError(kFailedBefore + error.what(), error.code(), error.ranks());
    } catch (const std::exception& error) {
      throw DistBackendError(kFailedBefore + error.what(), Code::aborted, {options.group->rank()});
    }
  }
  if (!under_way) return;
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < ready.size(); ++i)
    if (!ready[i]) missing.push_back(i);
  const std::string rank = std::to_string(options.group->rank());
  std::string indices;
  for (const std::size_t index : missing) {
    if (!indices.empty()) indices += ' ';
    indices += std::to_string(index);
  }
  throw DistError(
      "Expected to have finished reduction in the prior iteration before starting a new one: some "
      "parameters took no part in the loss of "
      "the last backward pass, so their buckets still wait for them. Let every output of forward "
      "feed the loss, or set "
      "find_unused_parameters where the model leaves parts out.\nParameters which did not receive "
      "grad for rank " +
          rank + ": " + names_of(missing) +
          "\nParameter indices which did not receive grad for rank " + rank + ": " + indices,
      Code::invalid_argument, {options.group->rank()});
}

void Reducer::State::arm(std::span<const at::Tensor> outputs) {
  mode = Mode::reduce;
  next = 0;
  released = false;
  one_by_one = false;
  unused.clear();
  unused_marked = false;
  ready.assign(ready.size(), false);
  for (Bucket& bucket : buckets) {
    bucket.pending = bucket.indices.size();
    bucket.in_place = at::Tensor();
  }
  went_in_place = 0;
  times.backward_start = steady_clock().now();
  if (options.static_graph) {
    static_left = static_counts;
    if (!static_known) return;
    for (std::size_t i = 0; i < parameters.size(); ++i)
      if (static_counts[i] == 0) unused.push_back(i);
    return;
  }
  if (options.find_unused_parameters) find_unused(outputs);
}

void Reducer::State::find_unused(std::span<const at::Tensor> outputs) {
  std::unordered_set<Node*> seen;
  std::vector<Node*> open;
  const auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  for (const at::Tensor& output : outputs)
    if (output.defined() && output.requires_grad())
      visit(torch::autograd::impl::gradient_edge(output).function.get());
  while (!open.empty()) {
    Node* node = open.back();
    open.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (!seen.contains(accumulators[i].get())) unused.push_back(i);
}

/// So that the reducer hears of a backward pass before its first gradient. Leaves would keep their
/// hooks for ever.
void Reducer::State::watch_backward(std::span<const at::Tensor> outputs) {
  end_queued = false;
  gave_gradients = false;
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
// --------------------------------------------------------------------------------------------------------

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
  state_->detach();
  const std::lock_guard lock(state_->mutex);
  if (!state_->refused) return;
  state_->failure = state_->refused;
  state_->tell_others();
}

void Reducer::check_finished() const {
  const std::lock_guard lock(state_->mutex);
  state_->check_finished();
}

void Reducer::prepare_forward() {
  const std::lock_guard lock(state_->mutex);
  state_->check_finished();
  state_->refused = nullptr;
  state_->attach_anew();
  ++state_->iteration;
  state_->times.forward_start = steady_clock().now();
  if (!state_->has_rebuilt && state_->arrived.size() == state_->parameters.size())
    state_->rebuild();
}

void Reducer::prepare_backward(std::span<const at::Tensor> outputs) {
  const std::lock_guard lock(state_->mutex);
  state_->arm(outputs);
  state_->watch_backward(outputs);
}

void Reducer::skip_backward(std::span<const at::Tensor> outputs) {
  const std::lock_guard lock(state_->mutex);
  state_->mode = State::Mode::local;
  state_->watch_backward(outputs);
}

void Reducer::shadow_backward() {
  const std::lock_guard lock(state_->mutex);
  state_->shadow();
}

void Reducer::set_divisor(int ranks) {
  const std::lock_guard lock(state_->mutex);
  state_->divisor = ranks;
}

void Reducer::follow_parameters() {
  const std::lock_guard lock(state_->mutex);
  state_->detach();
  state_->attach();
}

void Reducer::set_hook(CommHook hook) {
  const std::lock_guard lock(state_->mutex);
  if (state_->hook) group::invalid("a communication hook was registered before; a model takes one");
  if (state_->under_way || !state_->arrived.empty())
    group::invalid("register the communication hook before the first backward pass");
  state_->hook = std::move(hook);
  state_->lay_out_first();  // a hook is given whole buckets
}

void Reducer::set_sample_rate(int iterations) {
  const std::lock_guard lock(state_->mutex);
  if (iterations < 1) group::invalid("the sample rate is a number of iterations, at least 1");
  state_->statistics.set_sample_rate(iterations);
}

std::vector<std::int64_t> Reducer::bucket_bytes() const {
  const std::lock_guard lock(state_->mutex);
  std::vector<std::int64_t> bytes;
  for (const auto& bucket : state_->buckets) {
    if (bucket.sparse || bucket.alone) {
      bytes.push_back(
          static_cast<std::int64_t>(state_->parameters[bucket.indices.front()].nbytes()));
    } else {
      bytes.push_back(static_cast<std::int64_t>(bucket.memory.nbytes()));
    }
  }
  return bytes;
}

std::size_t Reducer::in_place() const {
  const std::lock_guard lock(state_->mutex);
  return state_->went_in_place;
}

bool Reducer::is_quiet() const {
  const std::lock_guard lock(state_->mutex);
  return !state_->under_way && !state_->failure && !state_->refused;
}

bool Reducer::rebuilt() const {
  const std::lock_guard lock(state_->mutex);
  return state_->has_rebuilt;
}

}  // namespace muster::parallel
