// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/backends/native.h"

#include <ATen/Parallel.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

#include "core/base/dtype.h"
#include "core/base/keep_forever.h"
#include "core/collective/op.h"
#include "core/group/call/call.h"
#include "core/group/call/dense_tensor.h"
#include "core/group/device_memory.h"
#include "core/group/errors.h"

namespace muster::group {

namespace {

/// How long a wait for a call also waits for the call's future, which another thread completes. The
/// future need not complete before the callbacks of earlier calls have returned.
constexpr auto kFutureGrace = std::chrono::milliseconds(100);  // limit: delay of a callback

}  // namespace

struct NativeWork::Delivery {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::shared_ptr<CallbackLane> lane;  // null: unordered
  std::shared_ptr<BackwardGate> gate;  // null: immediately
  // The callback that requested the future may wait for it.
  std::optional<CallbackLane::Busy> waited_for;
  // The scope of the request: callbacks make calls on its groups.
  std::weak_ptr<WorldScope> world;
  std::atomic<bool> posted{false};
  bool ended = false;  // under the Work's mutex
};

std::shared_ptr<NativeWork> NativeWork::create(Call call, NativeContext context) {
  // Destroying tensors may take Python's GIL, which the engine's thread must not wait for.
  const auto destroy = [](NativeWork* work) {
    if (!CallbackExecutor::spares_this_thread()) {
      delete work;
    } else {
      CallbackExecutor::of_process().run([work] { delete work; });
    }
  };
  return {new NativeWork(std::move(call), std::move(context)), destroy};
}

NativeWork::NativeWork(Call call, NativeContext context)
    : context_(std::move(context)), call_(std::move(call)) {}

const DeviceCopies* NativeWork::device() const {
  const Staging* const staging = call_.staging();
  return staging != nullptr ? staging->device() : nullptr;
}

std::vector<at::Tensor> NativeWork::result() {
  std::vector<at::Tensor> tensors;
  for (const auto& slice : call_.outputs())
    tensors.insert(tensors.end(), slice.begin(), slice.end());
  return tensors;
}

void NativeWork::track(collective::PendingRef pending) {
  pending_ = std::move(pending);
  if (std::exchange(call_.record.recorder, nullptr) != nullptr)
    mark_ = trace::Mark(call_.group().parts().recorder, call_.record.ticket);
  // Keeps the tensors alive until the engine is done with them, even if the user drops the Work.
  try {
    pending_->when_settled(
        [self = shared_from_this()](const Status& status) { self->settle(status); });
  } catch (const std::bad_alloc&) {  // the call is in flight and would never be finished
    settle(pending_->wait(TimePoint::max()));
  }
}

/// Runs on the thread that detected completion, under the engine's lock. Copies may run user code
/// if a tensor has a user-defined class.
void NativeWork::settle(const Status& status) {
  if (!status.ok() || !call_.copies_back()) {
    try_finish(status);
  } else if (!claimed_.load()) {
    CallbackExecutor::of_process().run(
        [self = shared_from_this(), status] { self->try_finish(status); });
  }
}

/// Finishes the call after the engine has completed it with `status`. Returns false if another
/// thread does or did.
bool NativeWork::try_finish(const Status& status) {
  if (claimed_.exchange(true)) return false;
  finish(status);
  return true;
}

void NativeWork::finish(const Status& status) {
  // A completed Work must not keep connections and threads alive.
  const auto let_go = std::move(context_.communicator);
  try {
    check(status.ok() ? status : status.with_context(call_.name()));
    call_.finish();
    mark_.end();
  } catch (const std::exception& error) {
    mark_.fail(error.what());
    error_ = std::current_exception();
  }
  std::shared_ptr<Delivery> delivery;
  {
    const std::lock_guard lock(mutex_);
    completed_.store(true, std::memory_order_release);
    delivery = delivery_;
  }
  completion_.notify_all();
  if (delivery) deliver(delivery);
}

/// After completion: completes the future when and on the thread its callbacks may run.
void NativeWork::deliver(const std::shared_ptr<Delivery>& delivery) {
  if (!delivery->gate || error_) return post(delivery);
  delivery->gate->run([self = shared_from_this(), delivery] { self->post(delivery); },
                      delivery->future.get());
}

void NativeWork::post(const std::shared_ptr<Delivery>& delivery) {
  if (delivery->posted.exchange(true)) return;
  auto end = [self = shared_from_this(), delivery] {
    const WorldScope::Binding bound(delivery->world.lock());
    self->end(*delivery->future);
    delivery->waited_for.reset();
  };
  delivery->lane ? delivery->lane->run(std::move(end))
                 : CallbackExecutor::of_process().run(std::move(end));
}

/// After a wait for the call, its future should be completed too.
void NativeWork::wait_for_future() {
  std::unique_lock lock(mutex_);
  const auto delivery = delivery_;
  if (!delivery || delivery->ended) return;
  lock.unlock();
  if (delivery->lane && delivery->lane->runs_on_this_thread())
    return;        // the future completes after this callback
  post(delivery);  // a wait in a backward pass happens on every rank
  lock.lock();
  completion_.wait_for(lock, kFutureGrace, [&] { return delivery->ended; });
}

/// A future of accelerator tensors records the work its device still has to do on the current
/// stream.
void NativeWork::end(c10::ivalue::Future& future) {
  if (error_) {
    show_error();
    future.setErrorIfNeeded(error_);
    return;
  }
  std::optional<c10::StreamGuard> stream;
  if (device() != nullptr) stream.emplace(device()->stream());
  future.markCompleted(c10::IValue(result()));
}

bool NativeWork::is_completed() {
  if (completed_.load(std::memory_order_acquire)) return true;
  // The engine's notification may be about to run on another thread; the first to see the end
  // finishes the call.
  if (!pending_->done()) return false;
  try_finish(pending_->wait(TimePoint::max()));
  return completed_.load(std::memory_order_acquire);
}

bool NativeWork::is_success() {
  if (!is_completed()) return false;
  if (error_) show_error();
  return !error_;
}

bool NativeWork::wait_until_completed(TimePoint deadline) {
  std::unique_lock lock(mutex_);
  const auto completed = [this] { return completed_.load(std::memory_order_relaxed); };
  if (deadline != TimePoint::max()) return completion_.wait_until(lock, deadline, completed);
  completion_.wait(lock, completed);
  return true;
}

void NativeWork::throw_timeout(Duration timeout, const Status& status) const {
  raise(Status(Code::timed_out,
               std::string(call_.name()) + " was not done within the " + describe(timeout) +
                   " that wait() was given; it goes on",
               status.ranks()));
}

bool NativeWork::wait(std::optional<Duration> timeout) {
  if (!completed_.load(std::memory_order_acquire)) {
    const auto deadline = timeout ? deadline_after(steady_clock(), *timeout) : TimePoint::max();
    auto status = pending_->wait(deadline);
    if (status.code() == Code::timed_out) {  // the call, or this wait
      if (!pending_->done()) throw_timeout(*timeout, status);
      status = pending_->wait(TimePoint::max());
    }
    if (!try_finish(status) && !wait_until_completed(deadline)) throw_timeout(*timeout, status);
  }
  wait_for_future();
  if (!error_) {
    if (device() != nullptr) device()->join();
    return true;
  }
  show_error();
  std::rethrow_exception(error_);
}

c10::intrusive_ptr<c10::ivalue::Future> NativeWork::get_future() {
  {
    const std::lock_guard lock(mutex_);
    if (delivery_) return delivery_->future;
  }
  const auto* device = this->device();
  const auto delivery = std::make_shared<Delivery>();
  delivery->future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()),
      device != nullptr ? device->asynchronous() : std::vector<c10::Device>{});
  if (!collective::is_message(call_.op())) {
    delivery->lane = CallbackLane::of_this_job();
    if (!delivery->lane) delivery->lane = context_.callbacks;
    delivery->gate = BackwardGate::of_this_pass();
    delivery->waited_for.emplace();
  }
  delivery->world = WorldScope::current();
  // Runs as the first callback: the future is complete, and the others are about to run.
  delivery->future->addCallback([weak = weak_from_this()](c10::ivalue::Future&) {
    const auto self = weak.lock();
    if (!self) return;
    {
      const std::lock_guard lock(self->mutex_);
      self->delivery_->ended = true;
    }
    self->completion_.notify_all();
  });
  check(CallbackExecutor::of_process().prepare());
  {
    const std::lock_guard lock(mutex_);
    if (delivery_) return delivery_->future;
    delivery_ = delivery;
    if (!completed_.load(std::memory_order_relaxed)) return delivery->future;
  }
  // Completed before the request. In a backward pass the gate still applies, because on other ranks
  // the call may not have completed yet.
  if (delivery->gate) {
    deliver(delivery);
  } else {
    end(*delivery->future);  // it has no callbacks yet
    delivery->waited_for.reset();
  }
  return delivery->future;
}

int NativeWork::source_rank() {
  if (call_.op() != Op::recv || !is_success()) return -1;
  return (*context_.ranks)[static_cast<std::size_t>(pending_->source())];
}

std::exception_ptr NativeWork::exception() {
  if (!is_completed()) return nullptr;
  if (error_) show_error();
  return error_;
}

namespace {

/// The error was found before anything was sent, so other members do not know of it.
bool is_refusal(const Status& status) {
  return status.code() == Code::invalid_argument || status.code() == Code::unsupported;
}

}  // namespace

NativeBackend::NativeBackend(std::string name,
                             std::shared_ptr<collective::Communicator> communicator,
                             std::vector<int> ranks)
    : name_(std::move(name)),
      communicator_(std::move(communicator)),
      capabilities_{
          .name = name_, .scaled_sums = true, .shares_memory = communicator_->shares_memory()},
      ranks_(std::make_shared<const std::vector<int>>(std::move(ranks))) {}

bool NativeBackend::supports(Op op, at::ScalarType dtype, c10::DeviceType device,
                             std::string* why) const {
  if (device == c10::DeviceType::CPU) return true;  // checked with the call
  std::string missing;
  if (device == c10::DeviceType::Meta)
    missing = "a tensor on meta has no values";
  else if (collective::info(op).reduces && !is_reducible(group::to_dtype(dtype)))
    missing = std::string("elements of ") + c10::toString(dtype) +
              " can be moved but not reduced; convert the tensor to another type first (to())";
  if (why != nullptr) *why = missing;
  return missing.empty();
}

WorkRef NativeBackend::submit(BackendCall& given) {
  Call& call = static_cast<Call&>(given);  // a group makes no other
  if (call.is_refused()) [[unlikely]]
    return refuse(call);
  if (!call.is_dense() && !use_device_memory(call, *communicator_)) call.stage();
  if (call.is_async() || (call.op() == Op::recv && call.args.root == transport::kAnyMember))
    return submit_async(call);
  const Status status = communicator_->run(call.args, call.record);
  if (!status.ok()) [[unlikely]]
    fail(call, status);
  call.finish();
  return nullptr;
}

/// The Work holds the call, whose memory the engine uses, until it completes.
WorkRef NativeBackend::submit_async(Call& given) {
  given.hold();
  const auto work =
      NativeWork::create(std::move(given), {communicator_, ranks_, shown_, callbacks_});
  Call& call = work->given();
  auto pending = communicator_->start(call.args, call.record, work);
  if (!call.record.started && !call.is_message()) {
    if (const auto status = pending->wait(TimePoint::max()); is_refusal(status)) fail(call, status);
  }
  call.record.on_started(0);  // if it did not start, it is recorded all the same
  const bool waits = !call.is_async();
  work->track(std::move(pending));
  if (waits) work->wait();
  return work;
}

std::shared_ptr<void> NativeBackend::manual_progress() {
  const auto& fabric = communicator_->channel().fabric();
  const auto hosts = fabric.hosts();
  const int mine = hosts[static_cast<std::size_t>(fabric.rank())];
  const auto elsewhere = [&](int member) {
    return hosts[static_cast<std::size_t>(member)] != mine;
  };
  if (std::ranges::any_of(communicator_->members(), elsewhere))
    return nullptr;  // a network needs no core of this host
  const auto here = std::count(hosts.begin(), hosts.end(), mine);
  // Each rank needs one more thread to drive calls while the others compute.
  const auto threads = here * (at::get_num_threads() + 1);
  return fabric.cores() >= threads ? nullptr : communicator_->manual_progress();
}

std::shared_ptr<void> NativeBackend::scope(BackendScope kind) {
  if (kind == BackendScope::manual_progress) return manual_progress();
  struct Stretch {
    explicit Stretch(std::shared_ptr<collective::Communicator> in)
        : communicator(std::move(in)), batch(communicator->channel().fabric()) {}
    const std::shared_ptr<collective::Communicator> communicator;  // keeps the fabric alive
    transport::SendBatch batch;
  };
  return std::make_shared<Stretch>(communicator_);
}

void NativeBackend::fail(Call& call, const Status& status) {
  if (is_refusal(status) && communicator_->failure().ok())
    call.group().refuse(call, DistError(status));
  if (communicator_->keeps_memory()) {
    call.hold();
    call.record.on_failed(status.message());
    keep_forever(std::make_shared<Call>(std::move(call)));
  }
  *shown_ = true;
  raise(status.with_context(call.name()));
}

WorkRef NativeBackend::refuse(const Call& call) {
  refused_ = true;
  communicator_->refuse(call.op());
  return nullptr;
}

BackendState NativeBackend::state() const {
  BackendState state{communicator_->failure(), shown_->load(), communicator_->sequence()};
  if (state.failure_was_shown || !refused_) return state;
  // If the other members' calls failed because of this process's refused call, it has already
  // thrown the reason.
  const int me = communicator_->members()[static_cast<std::size_t>(communicator_->rank())];
  const auto& ranks = state.failure.ranks();
  state.failure_was_shown = std::find(ranks.begin(), ranks.end(), me) != ranks.end();
  return state;
}

}  // namespace muster::group
