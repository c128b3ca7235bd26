#include <ATen/ScalarOps.h>

#include <cstring>
#include <numeric>

#include "muster/base/debug_level.h"
#include "muster/base/log.h"
#include "muster/group/backward_gate.h"
#include "muster/group/collectives.h"
#include "muster/group/errors.h"
#include "muster/group/plain_tensor.h"
#include "muster/parallel/end_of_backward.h"
#include "muster/parallel/flat_memory.h"
#include "muster/parallel/reducer_state.h"

namespace muster::parallel {

// ---- during backward
// -------------------------------------------------------------------------------------------------

void Reducer::State::begin_backward() {
  if (mode == Mode::done || failure || std::exchange(end_queued, true)) return;
  const auto at_end = [self = shared_from_this()] {
    try {
      self->end_backward();
    } catch (...) {
      self->leave_backward();
    }
  };
  at_end_of_backward(at_end,
                     [self = shared_from_this()]() noexcept { self->left_in_the_middle(); });
  if (shared_sizes) shared_sizes->begin();
}

/// With what its handler holds.
void Reducer::State::leave_backward() const {
  if (options.frame.throw_as) options.frame.throw_as();
  throw;
}

namespace {

/// At its end other threads drive what is left.
struct Rest {
  std::shared_ptr<void>& driving;
  ~Rest() { driving.reset(); }
};

/// How many tensors that nobody but autograd knows of hold the memory of `gradient`, itself among
/// them, while its hook runs.
std::size_t autograds_owners(const at::Tensor& gradient, const std::vector<at::Tensor>& given) {
  if (!gradient.defined() || gradient.layout() != at::kStrided || given.size() != 1) return 1;
  const at::Tensor& source = given.front();  // of which autograd may have made the gradient
  if (!source.defined() || source.use_count() != 1 || source.layout() != at::kStrided ||
      !gradient.is_alias_of(source))
    return 1;
  if (!source.is_view()) return 2;
  const at::TensorBase base = source._base();  // a matrix of which the source is the transpose
  return base.use_count() == 2 ? 3 : 2;
}

}  // namespace

/// `given` is what autograd has accumulated. It keeps that until this returns, and may have made it
/// the gradient itself.
void Reducer::State::on_gradient(std::size_t index, const std::vector<at::Tensor>& given) {
  const std::lock_guard lock(mutex);
  owners = {index, autograds_owners(parameters[index].grad(), given)};
  used.mutable_data_ptr<int>()[index] = 1;
  gave_gradients = true;
  if (failure) return;
  if (mode == Mode::local) {
    if (options.on_backward_end) begin_backward();
    return;
  }
  if (mode == Mode::done) {
    refused = std::make_exception_ptr(DistError(
        "backward ran a second time over one forward pass: the gradient of " + name(index) +
            " would be added to an average on this rank alone. Call forward again, or run all but "
            "the last backward under no_sync",
        Code::invalid_argument, {options.group->rank()}));
    std::rethrow_exception(refused);
  }
  begin_backward();
  try {
    under_way = true;
    if (!driving && !hook) driving = options.group->drive_here();
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

void Reducer::State::release() {
  const std::lock_guard lock(mutex);
  if (mode != Mode::reduce || failure) return;
  released = true;
  try {
    launch_full();
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
    throw DistError("Expected to mark a variable ready only once: the gradient of " + name(index) +
                        " came a second time in one backward pass. The parameter is used by "
                        "several backward passes of one forward, or by parts "
                        "that run forward again inside backward; set static_graph where every pass "
                        "does the same, or call backward once",
                    Code::invalid_argument, {options.group->rank()});
  ready[index] = true;
  if (!has_rebuilt) arrived.push_back(index);
  if (is_sparse(index)) {
    fill_sparse(index);
  } else {
    fill(index);
  }
  if (--buckets[places[index].bucket].pending == 0) launch_full();
}

/// Whether nobody but the parameter and this reducer knows of this pass's gradient, and it lies as
/// the others' do.
bool Reducer::State::travels_in_place(std::size_t index, const at::Tensor& gradient) const {
  const at::Tensor& parameter = parameters[index];
  const bool same_layout = gradient.strides() == parameter.strides() ||
                           (gradient.is_contiguous() && parameter.is_contiguous());
  const std::size_t expected = owners.index == index ? owners.count : 1;
  return used.const_data_ptr<int>()[index] != 0 &&
         gradient.scalar_type() == buckets[places[index].bucket].dtype &&
         !gradient.requires_grad() && !gradient.is_neg() && gradient.is_cpu() &&
         gradient.is_non_overlapping_and_dense() && same_layout &&
         accumulators[index]->post_hooks().size() == 1 &&
         gradient.storage().use_count() == expected;
}

namespace {

/// Whether the elements of both are their memory, in the same order: most gradients are so small
/// that calling an operator on them takes longer than what it does.
bool lie_alike(const at::Tensor& a, const at::Tensor& b) {
  const auto plain = [](const at::Tensor& tensor) {
    return tensor.is_cpu() && tensor.layout() == at::kStrided &&
           tensor.scalar_type() == at::kFloat && !tensor.is_neg() &&
           tensor.is_non_overlapping_and_dense();
  };
  return plain(a) && plain(b) && a.sizes() == b.sizes() && a.strides() == b.strides();
}

void multiply(const at::Tensor& place, const at::Tensor& gradient, float factor) {
  auto* to = place.mutable_data_ptr<float>();
  const auto* from = gradient.const_data_ptr<float>();
  for (std::int64_t i = 0, count = gradient.numel(); i < count; ++i) to[i] = from[i] * factor;
}

}  // namespace

/// Copies the gradient into its bucket, divided unless a hook or the reduction does that.
void Reducer::State::fill(std::size_t index) {
  const at::NoGradGuard no_grad;
  at::Tensor& gradient = parameters[index].mutable_grad();
  Bucket& bucket = buckets[places[index].bucket];
  if (bucket.alone && gradient.defined() && !gradient.is_sparse() &&
      travels_in_place(index, gradient)) {
    bucket.in_place =
        at::empty({0}, gradient.options())
            .set_(gradient.storage(), gradient.storage_offset(), {gradient.numel()}, {1});
    ++went_in_place;
    return;
  }
  at::Tensor place = view(index);
  if (!gradient.defined()) {
    place.zero_();
    return;
  }
  if (gradient.is_sparse())
    throw DistError("the gradient of " + name(index) +
                        " is sparse, which was not expected: only those of Embedding and "
                        "EmbeddingBag modules made with sparse(true) may be",
                    Code::invalid_argument);
  if (gradient.is_alias_of(place)) {
    if (!hook) place.div_(divisor);
    return;
  }
  if (hook || bucket.alone) {
    place.copy_(gradient.detach());
  } else if (place.scalar_type() != gradient.scalar_type()) {
    place.copy_(gradient.detach())
        .div_(divisor);  // the product would have the narrower type's bits
  } else if (lie_alike(place, gradient)) {
    multiply(place, gradient, static_cast<float>(1.0 / divisor));
  } else {
    at::mul_out(place, gradient.detach(), at::native::wrapped_scalar_tensor(1.0 / divisor));
  }
  if (options.gradient_as_bucket_view) gradient = place;
}

/// A gradient of a parameter that was left out.
at::Tensor Reducer::State::no_values(const at::Tensor& parameter) const {
  const auto options_of =
      at::TensorOptions(travels_as(parameter)).device(parameter.device()).layout(at::kSparse);
  return at::_sparse_coo_tensor_with_dims(1, parameter.dim() - 1, parameter.sizes(), options_of);
}

/// The bucket is the gradient itself, as sparse as it came.
void Reducer::State::fill_sparse(std::size_t index) {
  const at::NoGradGuard no_grad;
  const at::Tensor& gradient = parameters[index].grad();
  at::Tensor& memory = buckets[places[index].bucket].memory;
  if (!gradient.defined()) {
    memory = no_values(parameters[index]);
    return;
  }
  memory = (gradient.is_sparse() ? gradient.detach() : gradient.detach().to_sparse(1))
               .to(travels_as(parameters[index]));
  memory = hook ? memory.clone() : memory.div(divisor);
}

namespace {

/// While it lives the caller's lock is free: hooks are the user's code, and may ask the model
/// things.
class Unlocked {
 public:
  explicit Unlocked(std::mutex& mutex) : mutex_(mutex) { mutex_.unlock(); }
  ~Unlocked() { mutex_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  std::mutex& mutex_;
};

/// Buckets are launched by one thread at a time, in their order.
class Launching {
 public:
  explicit Launching(bool& flag) : flag_(flag) { flag_ = true; }
  ~Launching() { flag_ = false; }
  Launching(const Launching&) = delete;
  Launching& operator=(const Launching&) = delete;

 private:
  bool& flag_;
};

}  // namespace

/// Where no core is free nothing can overlap: what travels in the middle of backward only takes
/// core and cache away from it.
void Reducer::State::launch_full() {
  if (driving && !released) return;
  if (is_held() || launching || next == buckets.size()) return;
  const Launching one(launching);
  const auto now = steady_clock().now();
  while (next < buckets.size() && buckets[next].pending == 0) launch(next++);
  if (next < buckets.size()) return;
  times.backward_end = now;
  if (tracks_use()) used_work = all_reduce(used, {.group = options.group, .async_op = !one_by_one});
}

/// For what was not divided when it was filled in. The mean of many 16-bit floats may fit where
/// their sum does not.
ReduceOp Reducer::State::averaging(at::ScalarType dtype) const {
  const bool wide = dtype == at::kFloat || dtype == at::kDouble;
  return wide && divisor == options.group->size() ? ReduceOp(ReduceOp::AVG)
                                                  : ReduceOp::premul_sum(1.0 / divisor);
}

void Reducer::State::launch(std::size_t number) {
  if (number == 0) times.comm_start = steady_clock().now();
  Bucket& bucket = buckets[number];
  if (!hook) {
    if (bucket.sparse)
      return;  // those need several rounds, which nobody should wait for in the middle of backward
    const at::Tensor& travels = bucket.in_place.defined() ? bucket.in_place : bucket.memory;
    const ReduceOp op = bucket.alone ? averaging(travels.scalar_type()) : ReduceOp::SUM;
    bucket.work = all_reduce(travels, {.op = op, .group = options.group, .async_op = !one_by_one});
    return;
  }
  GradBucket given{.index = number,
                   .is_last = number + 1 == buckets.size(),
                   .buffer = bucket.memory,
                   .gradients = bucket.views,
                   .group = options.group};
  for (at::Tensor& gradient : given.gradients)
    if (gradient.is_complex()) gradient = at::view_as_real(gradient);
  if (bucket.sparse) given.gradients = {bucket.memory};
  for (const std::size_t index : bucket.indices) given.parameters.push_back(parameters[index]);
  const CommHook call = hook;
  std::function<at::Tensor()> finish;
  {
    const Unlocked callers(mutex);
    finish = call(given);
  }
  buckets[number].finish = std::move(finish);
}

// ---- after backward
// --------------------------------------------------------------------------------------------------

void Reducer::State::end_backward() {
  {
    const std::lock_guard lock(mutex);
    end_queued = false;
    if (shared_sizes) shared_sizes->end();
    const Rest rest{driving};
    if (failure || !gave_gradients) return;
    try {
      if (mode == Mode::reduce && under_way) {
        group::BackwardGate::open_on_this_thread();
        released = true;
        const auto finish = [this] {
          one_by_one = std::exchange(driving, nullptr) != nullptr;
          if (options.static_graph && !static_known) mark_static_first();
          // Outputs may be left out of the loss too: what they alone depend on gets no gradient in
          // this pass.
          if (tracks_use())
            for (std::size_t i = 0; i < parameters.size(); ++i)
              if (!ready[i]) mark_ready(i);
          launch_full();
          if (next == buckets.size()) finish_pass();
        };
        options.frame.wait_in ? options.frame.wait_in(options.group, finish) : finish();
      }
    } catch (...) {
      failure = std::current_exception();
      tell_others();
      throw;
    }
  }
  if (options.on_backward_end) options.on_backward_end();
}

void Reducer::State::left_in_the_middle() noexcept {
  const std::lock_guard lock(mutex);
  end_queued = false;
  if (shared_sizes) shared_sizes->end();
  driving.reset();
  if (mode != Mode::reduce) return;
  if (!failure)
    failure = std::make_exception_ptr(
        DistError("an exception ended backward in the middle, before all gradients were averaged",
                  Code::aborted, {options.group->rank()}));
  tell_others();
}

/// They wait for gradients that will not come. Where the group has failed already its first cause
/// stays; destroying it need not throw that on top of what backward throws.
void Reducer::State::tell_others() const noexcept {
  try {
    std::string why;
    try {
      std::rethrow_exception(failure);
    } catch (const std::exception& error) {
      why = error.what();
    } catch (...) {
      why = "an exception of an unknown type";
    }
    options.group->abort("averaging the gradients failed on rank " +
                         std::to_string(options.group->rank()) + ": " + why);
  } catch (const std::exception& error) {
    log(LogLevel::warning,
        std::string("the other ranks could not be told that backward failed here: ") +
            error.what());
  }
}

/// The first pass of a static graph: only now is known which gradients come, and how often.
void Reducer::State::mark_static_first() {
  static_known = true;
  learn_static_use();
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (static_counts[i] == 0) static_order.push_back(i);
  for (const std::size_t index : static_order) mark_ready(index);
}

/// Once for all passes: what no rank's graph holds will never get a gradient.
void Reducer::State::learn_static_use() {
  if (!static_use.empty()) return;
  all_reduce(used, {.group = options.group});
  for (std::size_t i = 0; i < parameters.size(); ++i)
    static_use.push_back(used[static_cast<std::int64_t>(i)].item<int>() != 0);
}

/// On any rank. Such a parameter keeps what it had, so that an optimizer leaves it alone.
bool Reducer::State::nobody_used(std::size_t index) const {
  if (options.static_graph) return !static_use[index];
  return tracks_use() && used[static_cast<std::int64_t>(index)].item<int>() == 0;
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
  if (used_work) std::exchange(used_work, nullptr)->wait();
  for (Bucket& bucket : buckets) {
    const at::Tensor averaged = finish_bucket(bucket);
    if (bucket.sparse) {
      give_back_sparse(bucket.indices.front(), averaged);
      bucket.memory = at::Tensor();
    } else if (bucket.in_place.defined()) {
      const std::size_t index = bucket.indices.front();
      const at::Tensor& gradient = parameters[index].grad();
      // The user may have put another tensor in its place meanwhile.
      if (!gradient.defined() || !gradient.is_alias_of(bucket.in_place))
        give_back(index, shaped_like(bucket.in_place, 0, parameters[index]));
      bucket.in_place = at::Tensor();
    } else {
      for (const std::size_t index : bucket.indices) give_back(index, view(index));
    }
  }
  used.zero_();
  mode = Mode::done;
  under_way = false;
  end_statistics();
  // Where unused parameters are looked for, the order may differ from pass to pass: the buckets
  // stay as they are.
  if (tracks_use()) has_rebuilt = true;
}

void Reducer::State::give_back(std::size_t index, const at::Tensor& averaged) {
  if (nobody_used(index)) return;
  at::Tensor& gradient = parameters[index].mutable_grad();
  if (options.gradient_as_bucket_view) {
    if (!gradient.defined() || !gradient.is_alias_of(averaged)) gradient = averaged;
    return;
  }
  if (options.reduce_dtype && gradient.defined() &&
      gradient.scalar_type() != averaged.scalar_type()) {
    gradient =
        averaged.to(at::promote_types(gradient.scalar_type(), averaged.scalar_type()), false, true);
  } else if (!gradient.defined()) {
    gradient = averaged.clone();
  } else if (lie_alike(gradient, averaged)) {
    std::memcpy(gradient.mutable_data_ptr(), averaged.const_data_ptr(), gradient.nbytes());
    group::mark_written(gradient);
  } else {
    gradient.copy_(averaged);
  }
}

void Reducer::State::give_back_sparse(std::size_t index, const at::Tensor& averaged) {
  if (nobody_used(index)) return;
  at::Tensor& gradient = parameters[index].mutable_grad();
  const bool dense = gradient.defined() && !gradient.is_sparse();
  const at::Tensor back =
      averaged.to(gradient.defined() ? gradient.scalar_type() : parameters[index].scalar_type());
  gradient = dense ? back.to_dense() : back;
}

void Reducer::State::end_statistics() {
  times.comm_end = steady_clock().now();
  if (get_debug_level() != DebugLevel::DETAIL || !statistics.samples(iteration)) return;
  statistics.add(times);
  std::int64_t unused_bytes = 0;
  for (const std::size_t index : unused)
    unused_bytes += static_cast<std::int64_t>(parameters[index].nbytes());
  log(LogLevel::info, statistics.text(options.model_name, options.group->rank(),
                                      options.group->size(), unused_bytes));
}

// ---- in place of backward
// --------------------------------------------------------------------------------------------

void Reducer::State::shadow() {
  const at::NoGradGuard no_grad;
  const Rest rest{driving};
  try {
    used.zero_();
    next = 0;
    released = true;
    one_by_one = false;
    for (Bucket& bucket : buckets) {
      bucket.pending = 0;
      if (bucket.sparse) {
        bucket.memory = no_values(parameters[bucket.indices.front()]);
      } else {
        if (!bucket.memory.defined()) give_memory(bucket);
        bucket.memory.zero_();
      }
    }
    if (options.static_graph) learn_static_use();
    launch_full();
    if (used_work) std::exchange(used_work, nullptr)->wait();
    for (Bucket& bucket : buckets) {
      keep_averages(bucket, finish_bucket(bucket));
      if (bucket.sparse) bucket.memory = at::Tensor();
    }
    used.zero_();
    mode = Mode::done;
    if (!has_rebuilt && arrived.empty()) {
      arrived.resize(parameters.size());
      std::iota(arrived.begin(), arrived.end(), std::size_t{0});
    }
    if (tracks_use()) has_rebuilt = true;
  } catch (...) {
    failure = std::current_exception();
    tell_others();
    throw;
  }
}

/// Gradients of a rank that had no input, for an optimizer that steps all the same.
void Reducer::State::keep_averages(const Bucket& bucket, const at::Tensor& averaged) {
  for (const std::size_t index : bucket.indices) {
    at::Tensor& gradient = parameters[index].mutable_grad();
    if (nobody_used(index)) {
      gradient.reset();  // an optimizer is not to step by one of an earlier iteration
    } else if (bucket.sparse) {
      gradient = averaged.to(parameters[index].scalar_type());
    } else if (options.gradient_as_bucket_view) {
      gradient = view(index);
    } else {
      gradient =
          view(index).to(parameters[index].scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    }
  }
}

}  // namespace muster::parallel
