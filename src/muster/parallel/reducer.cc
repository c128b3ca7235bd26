#include "muster/parallel/reducer.h"

#include <ATen/ScalarOps.h>
#include <ATen/TensorUtils.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <mutex>
#include <numeric>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "muster/group/collectives.h"
#include "muster/group/errors.h"
#include "muster/group/shared_tensor.h"
#include "muster/parallel/bucket_plan.h"

namespace muster::parallel {
namespace {

using torch::autograd::Node;
using NodeRef = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

/// Memory for a bucket: where the other ranks of the host can read it, if there is room.
at::Tensor bucket_memory(std::int64_t elements, const at::TensorOptions& options) {
  if (options.device().is_cpu()) {
    try {
      return empty_shared({elements}, options).zero_();
    } catch (const DistError& error) {
      if (error.code() != Code::exhausted) throw;
    }
  }
  return at::zeros({elements}, options);
}

/// A stretch of the bucket in the shape of its parameter, and in its strides where they leave no gaps. It shares the memory without being
/// a view in autograd's eyes, which an optimizer could not detach.
at::Tensor shaped(const at::Tensor& flat, std::int64_t at, const at::Tensor& parameter) {
  const auto strides = parameter.is_non_overlapping_and_dense() ? parameter.strides().vec() : at::detail::defaultStrides(parameter.sizes());
  return at::empty({0}, flat.options()).set_(flat.storage(), flat.storage_offset() + at, parameter.sizes(), strides);
}

}  // namespace

// ---- state -----------------------------------------------------------------------------------------------------------

struct Reducer::State : std::enable_shared_from_this<State> {
  struct Bucket {
    BucketIndices indices;
    at::Tensor memory;
    std::vector<at::Tensor> views;
    std::size_t pending = 0;
    WorkRef work;
    std::function<at::Tensor()> finish;  // with a hook
  };
  struct Place {
    std::size_t bucket = 0;
    std::size_t slot = 0;
  };
  struct Hook;

  State(std::vector<at::Tensor> parameters, ReducerOptions given);
  void attach();
  void detach();

  void lay_out(const std::vector<BucketIndices>& plan);
  void rebuild();
  void check_finished() const;
  void arm(std::span<const at::Tensor> outputs);
  void find_unused(std::span<const at::Tensor> outputs);

  void on_gradient(std::size_t index);
  void mark_ready(std::size_t index);
  void mark_unused();
  void fill(std::size_t index);
  void launch_full();
  void launch(std::size_t number);
  void end_of_backward();
  void finish_static_first();
  void finish_pass();
  void give_back(std::size_t index, const at::Tensor& averaged);

  std::string name(std::size_t index) const;
  std::string names_of(const std::vector<std::size_t>& indices) const;
  const at::Tensor& view(std::size_t index) const { return buckets[places[index].bucket].views[places[index].slot]; }
  bool tracks_use() const { return options.find_unused_parameters && !options.static_graph; }

  const std::vector<at::Tensor> parameters;
  const ReducerOptions options;
  const double ranks;
  CommHook hook;
  std::vector<NodeRef> accumulators;
  std::vector<std::uintptr_t> hook_keys;
  std::unordered_map<Node*, std::size_t> index_of;

  mutable std::mutex mutex;
  std::vector<Bucket> buckets;
  std::vector<Place> places;
  std::size_t next = 0;  // the bucket to be launched next
  /// What is done with gradients that come: `done` is after a pass that was reduced, before the next forward.
  enum class Mode { local, reduce, done } mode = Mode::local;
  bool under_way = false;
  bool callback_queued = false;
  std::vector<bool> ready;
  std::vector<std::size_t> arrived;  // order of the first pass
  bool has_rebuilt = false;
  std::vector<std::size_t> unused;  // found in this pass's graph
  bool unused_marked = false;
  at::Tensor used;  // 1 for each parameter that got a gradient here since the last reduction; then the sum over the ranks
  WorkRef used_work;
  std::exception_ptr failure;

  // With a static graph: how often each parameter's gradient came in the first pass, and how often it will still come in this one.
  bool static_known = false;
  std::vector<int> static_counts;
  std::vector<int> static_left;
  std::vector<std::size_t> static_order;
};

struct Reducer::State::Hook final : torch::autograd::FunctionPostHook {
  Hook(std::weak_ptr<State> state, std::size_t index) : state(std::move(state)), index(index) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs, const torch::autograd::variable_list&) override {
    if (const auto alive = state.lock()) alive->on_gradient(index);
    return outputs;
  }
  std::weak_ptr<State> state;
  std::size_t index;
};

Reducer::State::State(std::vector<at::Tensor> given_parameters, ReducerOptions given)
    : parameters(std::move(given_parameters)), options(std::move(given)), ranks(options.group->size()) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    if (!parameter.defined() || !parameter.requires_grad() || !parameter.is_leaf())
      group::invalid("a reducer's parameters must be leaves that require gradients; " + name(i) + " is not");
  }
  ready.assign(parameters.size(), false);
  static_counts.assign(parameters.size(), 0);
  used = at::zeros({static_cast<std::int64_t>(parameters.size())}, at::kInt);

  std::vector<ParameterFacts> facts;
  for (const at::Tensor& parameter : parameters)
    facts.push_back({static_cast<std::int64_t>(parameter.nbytes()), parameter.scalar_type(), parameter.device()});
  std::vector<std::size_t> order(parameters.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  // Where the first pass will tell the order, it may as well run with as few buckets as possible.
  const bool will_rebuild = options.static_graph || !options.find_unused_parameters;
  auto plan = will_rebuild ? plan_buckets(facts, order, INT64_MAX, INT64_MAX)
                           : plan_buckets(facts, order, options.first_bucket_bytes, options.bucket_cap_bytes);
  std::reverse(plan.begin(), plan.end());  // gradients come last parameter first
  lay_out(plan);
}

void Reducer::State::attach() {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    accumulators.push_back(torch::autograd::impl::grad_accumulator(parameters[i]));
    hook_keys.push_back(accumulators[i]->add_post_hook(std::make_unique<Hook>(weak_from_this(), i)));
    index_of[accumulators[i].get()] = i;
  }
}

void Reducer::State::detach() {
  for (std::size_t i = 0; i < accumulators.size(); ++i) accumulators[i]->del_post_hook(hook_keys[i]);
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

// ---- buckets ---------------------------------------------------------------------------------------------------------

void Reducer::State::lay_out(const std::vector<BucketIndices>& plan) {
  const at::NoGradGuard no_grad;
  std::vector<Bucket> made;
  places.assign(parameters.size(), {});
  for (const BucketIndices& indices : plan) {
    Bucket bucket;
    bucket.indices = indices;
    std::int64_t elements = 0;
    for (const std::size_t index : indices) elements += parameters[index].numel();
    bucket.memory = bucket_memory(elements, parameters[indices.front()].options().requires_grad(false));
    std::int64_t at = 0;
    for (const std::size_t index : indices) {
      places[index] = {made.size(), bucket.views.size()};
      bucket.views.push_back(shaped(bucket.memory, at, parameters[index]));
      at += parameters[index].numel();
      at::Tensor& gradient = parameters[index].mutable_grad();
      if (options.gradient_as_bucket_view && gradient.defined()) {
        bucket.views.back().copy_(gradient.detach());
        gradient = bucket.views.back();
      }
    }
    bucket.pending = indices.size();
    made.push_back(std::move(bucket));
  }
  buckets = std::move(made);
}

/// Rank 0's order of arrival becomes everybody's.
void Reducer::State::rebuild() {
  has_rebuilt = true;
  auto order = torch::tensor(std::vector<std::int64_t>(arrived.begin(), arrived.end()), at::kLong);
  broadcast(order, {.group = options.group, .group_src = 0});
  std::vector<ParameterFacts> facts;
  for (const at::Tensor& parameter : parameters)
    facts.push_back({static_cast<std::int64_t>(parameter.nbytes()), parameter.scalar_type(), parameter.device()});
  const auto* first = order.const_data_ptr<std::int64_t>();
  lay_out(
      plan_buckets(facts, std::vector<std::size_t>(first, first + order.numel()), options.first_bucket_bytes, options.bucket_cap_bytes));
}

// ---- before backward -------------------------------------------------------------------------------------------------

void Reducer::State::check_finished() const {
  if (failure) {
    try {
      std::rethrow_exception(failure);
    } catch (const DistError& error) {
      throw DistBackendError(std::string("an earlier reduction of the gradients failed, and this model cannot go on: ") + error.what(),
                             error.code(), error.ranks());
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
      "Expected to have finished reduction in the prior iteration before starting a new one: some parameters took no part in the loss of "
      "the "
      "last backward pass, so their buckets still wait for them. Let every output of forward feed the loss, or set find_unused_parameters "
      "where the model leaves parts out.\nParameters which did not receive grad for rank " +
          rank + ": " + names_of(missing) + "\nParameter indices which did not receive grad for rank " + rank + ": " + indices,
      Code::invalid_argument, {options.group->rank()});
}

void Reducer::State::arm(std::span<const at::Tensor> outputs) {
  mode = Mode::reduce;
  next = 0;
  callback_queued = false;
  unused.clear();
  unused_marked = false;
  ready.assign(ready.size(), false);
  for (Bucket& bucket : buckets) bucket.pending = bucket.indices.size();
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
    if (output.defined() && output.requires_grad()) visit(torch::autograd::impl::gradient_edge(output).function.get());
  while (!open.empty()) {
    Node* node = open.back();
    open.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  for (std::size_t i = 0; i < accumulators.size(); ++i)
    if (!seen.contains(accumulators[i].get())) unused.push_back(i);
}

// ---- during backward -------------------------------------------------------------------------------------------------

void Reducer::State::on_gradient(std::size_t index) {
  const std::lock_guard lock(mutex);
  used[static_cast<std::int64_t>(index)] = 1;
  if (mode == Mode::local || failure) return;
  if (mode == Mode::done)
    throw DistError(
        "backward ran a second time over one forward pass: the gradient of " + name(index) +
            " would be added to an average on this rank alone. Call forward again, or run all but the last backward under no_sync",
        Code::invalid_argument, {options.group->rank()});
  try {
    under_way = true;
    if (!std::exchange(callback_queued, true) && options.static_graph && !static_known) {
      torch::autograd::Engine::get_default_engine().queue_callback([state = shared_from_this()] {
        const std::lock_guard lock(state->mutex);
        state->finish_static_first();
      });
    }
    if (options.static_graph && !static_known) {
      if (++static_counts[index] == 1) static_order.push_back(index);
      return;
    }
    mark_unused();
    if (options.static_graph && --static_left[index] > 0) return;
    mark_ready(index);
  } catch (...) {
    failure = std::current_exception();
    throw;
  }
}

void Reducer::State::mark_unused() {
  if (std::exchange(unused_marked, true)) return;
  for (const std::size_t index : unused) mark_ready(index);
}

void Reducer::State::mark_ready(std::size_t index) {
  if (ready[index])
    throw DistError(
        "Expected to mark a variable ready only once: the gradient of " + name(index) +
            " came a second time in one backward pass. The parameter is used by several backward passes of one forward, or by parts "
            "that run forward again inside backward; set static_graph where every pass does the same, or call backward once",
        Code::invalid_argument, {options.group->rank()});
  ready[index] = true;
  if (!has_rebuilt) arrived.push_back(index);
  fill(index);
  if (--buckets[places[index].bucket].pending == 0) launch_full();
}

/// Copies the gradient into its bucket, divided unless a hook does that.
void Reducer::State::fill(std::size_t index) {
  const at::NoGradGuard no_grad;
  at::Tensor& gradient = parameters[index].mutable_grad();
  at::Tensor place = view(index);
  if (!gradient.defined()) {
    place.zero_();
    return;
  }
  if (gradient.is_sparse())
    throw DistError("the gradient of " + name(index) + " is sparse; DistributedDataParallel averages dense gradients only",
                    Code::invalid_argument);
  if (gradient.is_alias_of(place)) {
    if (!hook) place.mul_(1.0 / ranks);
    return;
  }
  if (hook) {
    place.copy_(gradient.detach());
  } else {
    at::mul_out(place, gradient.detach(), at::native::wrapped_scalar_tensor(1.0 / ranks));
  }
  if (options.gradient_as_bucket_view && !torch::GradMode::is_enabled()) gradient = place;
}

void Reducer::State::launch_full() {
  while (next < buckets.size() && buckets[next].pending == 0) launch(next++);
  if (next < buckets.size()) return;
  if (tracks_use()) used_work = all_reduce(used, {.group = options.group, .async_op = true});
  torch::autograd::Engine::get_default_engine().queue_callback([state = shared_from_this()] { state->end_of_backward(); });
}

void Reducer::State::launch(std::size_t number) {
  Bucket& bucket = buckets[number];
  if (!hook) {
    bucket.work = all_reduce(bucket.memory, {.group = options.group, .async_op = true});
    return;
  }
  GradBucket given{.index = number, .is_last = number + 1 == buckets.size(), .buffer = bucket.memory, .gradients = bucket.views};
  for (const std::size_t index : bucket.indices) given.parameters.push_back(parameters[index]);
  bucket.finish = hook(given);
}

// ---- after backward --------------------------------------------------------------------------------------------------

/// The first pass of a static graph: only now is known which gradients come, and how often.
void Reducer::State::finish_static_first() {
  try {
    static_known = true;
    for (std::size_t i = 0; i < parameters.size(); ++i)
      if (static_counts[i] == 0) static_order.push_back(i);
    for (const std::size_t index : static_order) mark_ready(index);
  } catch (...) {
    failure = std::current_exception();
    throw;
  }
}

void Reducer::State::end_of_backward() {
  const std::lock_guard lock(mutex);
  try {
    finish_pass();
  } catch (...) {
    failure = std::current_exception();
    throw;
  }
}

void Reducer::State::finish_pass() {
  const at::NoGradGuard no_grad;
  if (used_work) std::exchange(used_work, nullptr)->wait();
  for (Bucket& bucket : buckets) {
    at::Tensor averaged = bucket.memory;
    if (bucket.work) std::exchange(bucket.work, nullptr)->wait();
    if (bucket.finish) averaged = std::exchange(bucket.finish, nullptr)();
    if (averaged.numel() != bucket.memory.numel())
      throw DistError("a communication hook gave back " + std::to_string(averaged.numel()) + " elements for a bucket of " +
                      std::to_string(bucket.memory.numel()));
    if (!averaged.is_same(bucket.memory)) bucket.memory.copy_(averaged.view({-1}));
    for (const std::size_t index : bucket.indices) give_back(index, view(index));
  }
  used.zero_();
  mode = Mode::done;
  under_way = false;
  if (!options.find_unused_parameters || options.static_graph) return;
  has_rebuilt = true;  // the order may differ from pass to pass: the buckets stay as they are
}

void Reducer::State::give_back(std::size_t index, const at::Tensor& averaged) {
  // What nobody used keeps what it had, so that an optimizer leaves it alone.
  if (tracks_use() && used[static_cast<std::int64_t>(index)].item<int>() == 0) return;
  at::Tensor& gradient = parameters[index].mutable_grad();
  if (options.gradient_as_bucket_view) {
    if (!gradient.defined() || !gradient.is_alias_of(averaged)) gradient = averaged;
    return;
  }
  if (gradient.defined()) {
    gradient.copy_(averaged);
  } else {
    gradient = averaged.clone();
  }
}

// ---- the face --------------------------------------------------------------------------------------------------------

Reducer::Reducer(std::vector<at::Tensor> parameters, ReducerOptions options) {
  if (!options.group || !options.group->is_member()) group::invalid("a reducer needs a group that this rank is a member of");
  if (parameters.empty()) group::invalid("there is nothing to average: the module has no parameter that requires a gradient");
  state_ = std::make_shared<State>(std::move(parameters), std::move(options));
  state_->attach();
}

Reducer::~Reducer() { state_->detach(); }

void Reducer::prepare_forward() {
  const std::lock_guard lock(state_->mutex);
  state_->check_finished();
  if (!state_->has_rebuilt && state_->arrived.size() == state_->parameters.size()) state_->rebuild();
}

void Reducer::prepare_backward(std::span<const at::Tensor> outputs) {
  const std::lock_guard lock(state_->mutex);
  state_->arm(outputs);
}

void Reducer::skip_backward() {
  const std::lock_guard lock(state_->mutex);
  state_->mode = State::Mode::local;
}

void Reducer::set_hook(CommHook hook) {
  const std::lock_guard lock(state_->mutex);
  if (state_->hook) group::invalid("a communication hook was registered before; a model takes one");
  if (state_->under_way || !state_->arrived.empty()) group::invalid("register the communication hook before the first backward pass");
  state_->hook = std::move(hook);
}

std::vector<std::int64_t> Reducer::bucket_bytes() const {
  const std::lock_guard lock(state_->mutex);
  std::vector<std::int64_t> bytes;
  for (const auto& bucket : state_->buckets) bytes.push_back(static_cast<std::int64_t>(bucket.memory.nbytes()));
  return bytes;
}

bool Reducer::rebuilt() const {
  const std::lock_guard lock(state_->mutex);
  return state_->has_rebuilt;
}

}  // namespace muster::parallel
