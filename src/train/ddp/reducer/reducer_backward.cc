// SPDX-License-Identifier: BSD-3-Clause
#include <numeric>

#include "core/base/log/log.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "core/group/scopes.h"
#include "core/group/work/backward_gate.h"
#include "muster/collectives.h"
#include "train/ddp/reducer/reducer_state.h"
#include "train/modules/end_of_backward.h"

namespace muster::parallel {
namespace {

/// When it is destroyed, other threads take over driving the remaining calls.
struct DriverReset {
  std::shared_ptr<void>& driving;
  ~DriverReset() { driving.reset(); }
};

/// Releases the caller's lock during its lifetime: hooks are user code and may call the model.
class Unlocked {
 public:
  explicit Unlocked(std::mutex& mutex) : mutex_(mutex) { mutex_.unlock(); }
  ~Unlocked() { mutex_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  std::mutex& mutex_;
};

/// Marks that a thread is launching: one thread at a time launches buckets, in order.
class LaunchScope {
 public:
  explicit LaunchScope(bool& flag) : flag_(flag) { flag_ = true; }
  ~LaunchScope() { flag_ = false; }
  LaunchScope(const LaunchScope&) = delete;
  LaunchScope& operator=(const LaunchScope&) = delete;

 private:
  bool& flag_;
};

}  // namespace

// ---- during backward

void Reducer::State::begin_backward() {
  if (pass.mode == Pass::PassMode::done || failure || std::exchange(pass.end_queued, true)) return;
  const auto at_end = [self = shared_from_this()] {
    try {
      self->end_backward();
    } catch (...) {
      self->rethrow();
    }
  };
  at_end_of_backward(at_end,
                     [self = shared_from_this()]() noexcept { self->on_broken_backward(); });
  if (shared_sizes) shared_sizes->begin();
}

/// Rethrows the current exception.
void Reducer::State::rethrow() const {
  if (options.frame.throw_as) options.frame.throw_as();
  throw;
}

/// Null if the backends that reduce these gradients make progress by themselves.
std::shared_ptr<void> Reducer::State::manual_progress() const {
  for (const auto type : layout.device_types())
    if (auto scope = group::scope_on(core_of(options.group), BackendScope::manual_progress, type))
      return scope;
  return nullptr;
}

/// `given` is what autograd accumulated (`GradientCopies::record_owners`).
void Reducer::State::on_gradient(std::size_t index, const std::vector<at::Tensor>& given) {
  const std::lock_guard lock(mutex);
  copies.record_owners(index, given);
  use.record_gradient(index);
  pass.has_gradients = true;
  if (failure) return;
  if (pass.mode == Pass::PassMode::local) {
    if (options.on_backward_end) begin_backward();
    return;
  }
  if (pass.mode == Pass::PassMode::done) {
    refused = std::make_exception_ptr(DistError(
        "backward ran a second time over one forward pass: the gradient of " + layout.name(index) +
            " would be added to an average on this rank alone. Call forward again, or run all but "
            "the last backward under no_sync",
        Code::invalid_argument, {options.group->rank()}));
    std::rethrow_exception(refused);
  }
  begin_backward();
  try {
    pass.in_flight = true;
    if (!driving && !hook) driving = manual_progress();
    if (use.is_first_static_pass()) return use.record_first_pass(index);
    for (const std::size_t unused : use.consume_unused()) mark_ready(unused);
    if (!use.has_more_gradients(index)) mark_ready(index);
  } catch (...) {
    failure = std::current_exception();
    throw;
  }
}

void Reducer::State::release() {
  const std::lock_guard lock(mutex);
  if (pass.mode != Pass::PassMode::reduce || failure) return;
  pass.released = true;
  try {
    launch_full();
  } catch (...) {
    failure = std::current_exception();
    throw;
  }
}

void Reducer::State::mark_ready(std::size_t index) {
  if (pass.ready[index])
    throw DistError("Expected to mark a variable ready only once: the gradient of " +
                        layout.name(index) +
                        " came a second time in one backward pass. The parameter is used by "
                        "several backward passes of one forward, or by parts "
                        "that run forward again inside backward; set static_graph where every pass "
                        "does the same, or call backward once",
                    Code::invalid_argument, {options.group->rank()});
  pass.ready[index] = true;
  if (!is_rebuilt) arrived.push_back(index);
  copies.fill(index, *hooks);
  if (--layout.bucket_of(index).pending == 0) launch_full();
}

/// Launches buckets in the order of the layout, which all ranks share: a bucket that is full early
/// waits for those before it. With no free core, nothing can overlap; communication during backward
/// would only take core and cache away from it.
void Reducer::State::launch_full() {
  const std::vector<Bucket>& buckets = layout.buckets();
  if (driving && !pass.released) return;
  if (is_held() || pass.is_launching || pass.next == buckets.size()) return;
  const LaunchScope one(pass.is_launching);
  const auto now = steady_clock().now();
  while (pass.next < buckets.size() && buckets[pass.next].pending == 0) launch(pass.next++);
  if (pass.next < buckets.size()) return;
  timing.times.backward_end = now;
  if (use.is_exchanged()) use.exchange(!pass.sequential);
}

void Reducer::State::launch(std::size_t number) {
  if (number == 0) timing.times.comm_start = steady_clock().now();
  Bucket& bucket = layout.buckets()[number];
  if (!hook) {
    // Sparse buckets take several rounds, which must not block the middle of backward.
    if (bucket.sparse) return;
    const at::Tensor& reduced_memory = bucket.in_place.defined() ? bucket.in_place : bucket.memory;
    const ReduceOp op =
        bucket.alone ? copies.averaging(reduced_memory.scalar_type()) : ReduceOp::SUM;
    bucket.work = all_reduce(reduced_memory,
                             {.op = op, .group = options.group, .async_op = !pass.sequential});
    return;
  }
  GradBucket given{.index = number,
                   .is_last = number + 1 == layout.buckets().size(),
                   .buffer = bucket.memory,
                   .gradients = bucket.views,
                   .group = options.group};
  for (at::Tensor& gradient : given.gradients)
    if (gradient.is_complex()) gradient = at::view_as_real(gradient);
  if (bucket.sparse) given.gradients = {bucket.memory};
  for (const std::size_t index : bucket.indices)
    given.parameters.push_back(layout.parameters()[index]);
  const CommHook call = hook;
  std::function<at::Tensor()> finish;
  {
    const Unlocked callers(mutex);
    finish = call(given);
  }
  layout.buckets()[number].finish = std::move(finish);
}

// ---- after backward

void Reducer::State::end_backward() {
  bool reduces = false;
  {
    const std::lock_guard lock(mutex);
    pass.end_queued = false;
    if (shared_sizes) shared_sizes->end();
    const bool is_over = failure || !pass.has_gradients;
    reduces = !is_over && pass.mode == Pass::PassMode::reduce && pass.in_flight;
    if (!reduces) driving.reset();
    if (is_over) return;
    if (reduces) {
      group::BackwardGate::open_this_pass();
      pass.released = true;
    }
  }
  if (reduces) wait_for_rest();
  if (options.on_backward_end) options.on_backward_end();
}

/// `wait_in` and an abort call functions of the user's, Python's among them, so the lock is taken
/// inside of the first and released before the second.
void Reducer::State::wait_for_rest() {
  const auto finish = [this] {
    const std::lock_guard lock(mutex);
    const DriverReset rest{driving};
    reduce_rest();
  };
  try {
    options.frame.wait_in ? options.frame.wait_in(options.group, finish) : finish();
  } catch (...) {
    {
      const std::lock_guard lock(mutex);
      driving.reset();
      failure = std::current_exception();
    }
    abort_group(std::current_exception());
    throw;
  }
}

void Reducer::State::reduce_rest() {
  pass.sequential = std::exchange(driving, nullptr) != nullptr;
  if (use.is_first_static_pass())
    for (const std::size_t index : use.end_first_static_pass()) mark_ready(index);
  // Outputs may also be left out of the loss; parameters only they depend on get no gradient in
  // this pass.
  if (use.is_exchanged())
    for (std::size_t i = 0; i < layout.size(); ++i)
      if (!pass.ready[i]) mark_ready(i);
  launch_full();
  if (pass.next == layout.buckets().size()) finish_pass();
}

void Reducer::State::on_broken_backward() noexcept {
  std::exception_ptr why;
  {
    const std::lock_guard lock(mutex);
    pass.end_queued = false;
    if (shared_sizes) shared_sizes->end();
    driving.reset();
    if (pass.mode != Pass::PassMode::reduce) return;
    if (!failure)
      failure = std::make_exception_ptr(
          DistError("an exception ended backward in the middle, before all gradients were averaged",
                    Code::aborted, {options.group->rank()}));
    why = failure;
  }
  abort_group(why);
}

/// Aborts the group, because the other ranks wait for gradients that will not come. If the group
/// has already failed, its first cause stays; destroying it need not throw that in addition to
/// backward's exception. Called without the lock: an abort runs hooks of the user's.
void Reducer::State::abort_group(const std::exception_ptr& cause) const noexcept {
  try {
    std::string why;
    try {
      std::rethrow_exception(cause);
    } catch (const std::exception& error) {
      why = error.what();
    } catch (...) {
      why = "an exception of an unknown type";
    }
    core_of(options.group)
        .abort("averaging the gradients failed on rank " + std::to_string(options.group->rank()) +
               ": " + why);
  } catch (const std::exception& error) {
    log(LogLevel::warning,
        std::string("the other ranks could not be told that backward failed here: ") +
            error.what());
  }
}

at::Tensor Reducer::State::finish_bucket(Bucket& bucket) {
  if (bucket.work) std::exchange(bucket.work, nullptr)->wait();
  if (!bucket.finish) {
    if (bucket.sparse) all_reduce(bucket.memory, {.group = options.group});
    return bucket.memory;
  }
  auto finish = std::exchange(bucket.finish, nullptr);
  at::Tensor averaged;
  {
    const Unlocked callers(mutex);
    averaged = finish();
    finish = nullptr;
  }
  if (averaged.numel() != bucket.memory.numel())
    throw DistError("a communication hook gave back " + std::to_string(averaged.numel()) +
                    " elements for a bucket of " + std::to_string(bucket.memory.numel()));
  if (bucket.sparse) return averaged;
  if (!averaged.is_same(bucket.memory)) bucket.memory.copy_(averaged.view({-1}));
  return bucket.memory;
}

void Reducer::State::finish_pass() {
  const at::NoGradGuard no_grad;
  use.wait_for_exchange();
  for (Bucket& bucket : layout.buckets()) copies.store_averages(bucket, finish_bucket(bucket));
  use.clear();
  pass.mode = Pass::PassMode::done;
  pass.in_flight = false;
  end_statistics();
  // With find_unused_parameters the order may differ from pass to pass, so the buckets are not
  // rebuilt.
  if (use.is_exchanged()) is_rebuilt = true;
}

void Reducer::State::end_statistics() {
  timing.times.comm_end = steady_clock().now();
  if (get_debug_level() != DebugLevel::DETAIL || !timing.statistics.samples(timing.iteration))
    return;
  timing.statistics.add(timing.times);
  std::int64_t unused_bytes = 0;
  for (const std::size_t index : use.unused())
    unused_bytes += static_cast<std::int64_t>(layout.parameters()[index].nbytes());
  log(LogLevel::info, timing.statistics.text(options.model_name, options.group->rank(),
                                             options.group->size(), unused_bytes));
}

// ---- in place of backward

void Reducer::State::shadow() {
  const at::NoGradGuard no_grad;
  const DriverReset rest{driving};
  try {
    use.clear();
    pass.next = 0;
    pass.released = true;
    pass.sequential = false;
    for (Bucket& bucket : layout.buckets()) copies.fill_with_zeros(bucket);
    if (options.static_graph) use.exchange_static_use();
    launch_full();
    use.wait_for_exchange();
    for (Bucket& bucket : layout.buckets()) {
      copies.store_averages_without_input(bucket, finish_bucket(bucket));
      if (bucket.sparse) bucket.memory = at::Tensor();
    }
    use.clear();
    pass.mode = Pass::PassMode::done;
    if (!is_rebuilt && arrived.empty()) {
      arrived.resize(layout.size());
      std::iota(arrived.begin(), arrived.end(), std::size_t{0});
    }
    if (use.is_exchanged()) is_rebuilt = true;
  } catch (...) {
    failure = std::current_exception();
    {
      const Unlocked callers(mutex);
      abort_group(std::current_exception());
    }
    throw;
  }
}

}  // namespace muster::parallel
