// SPDX-License-Identifier: BSD-3-Clause
#include "backends/nccl/nccl_work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>
#include <utility>

#include "core/group/errors.h"
#include "core/tunables/tunables.h"

namespace muster::nccl {
namespace {

/// False with a version of torch that cannot tell.
template <class Guards>
bool is_capturing(const Guards& guards, const c10::Stream& stream) {
  if constexpr (requires { guards.isStreamCapturing(stream); })
    return guards.isStreamCapturing(stream);
  else
    return false;
}

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

NcclWork::NcclWork(NcclTransferPlan plan, NcclWorkTerms terms, c10::Device device,
                   std::shared_ptr<GroupFailure> failure)
    : terms_(std::move(terms)),
      device_(device),
      caller_(current_stream(device)),
      failure_(std::move(failure)) {
  for (const auto& slice : plan.outputs)
    results_.insert(results_.end(), slice.begin(), slice.end());
  transfer_.emplace(std::move(plan));
  captured_ = is_capturing(*c10::impl::getDeviceGuardImpl(device.type()), caller_);
  if (!terms_.is_async) return;
  ready_.emplace(device.type());
  ready_->record(caller_);
}

void NcclWork::launch(NcclCommunicator& communicator, const c10::Stream& own,
                      const NcclCommunicator::GiveUp& give_up) {
  const auto stream = terms_.is_async ? own : caller_;
  if (ready_) ready_->block(stream);
  {
    const c10::StreamGuard on(stream);
    transfer_->prepare();
    communicator.run(
        terms_.name,
        [&](CommHandle handle) {
          transfer_->enqueue(communicator, handle, stream.native_handle());
        },
        give_up);
    transfer_->finish();
  }
  note_launched(stream);
}

void NcclWork::launch_together(const std::vector<std::shared_ptr<NcclWork>>& works,
                               NcclCommunicator& communicator, const c10::Stream& own,
                               const NcclCommunicator::GiveUp& give_up) {
  if (works.empty()) return;
  for (const auto& work : works)
    if (work->captured_ != works.front()->captured_)
      throw DistBackendError(work->terms_.name +
                                 " (backend nccl): of the messages that two ranks have for each "
                                 "other, some belong to a graph that is captured; wait for the "
                                 "others before the capture begins",
                             Code::unsupported);
  // A graph takes every stream that waits for one it is captured from: not that of other messages.
  const auto stream = works.front()->captured_ ? works.front()->caller_ : own;
  {
    const c10::StreamGuard on(stream);
    for (const auto& work : works) {
      work->ready_->block(stream);
      work->transfer_->prepare();
    }
    communicator.run(
        works.front()->terms_.name,
        [&](CommHandle handle) {
          for (const auto& work : works)
            work->transfer_->enqueue(communicator, handle, stream.native_handle());
        },
        give_up);
    for (const auto& work : works) work->transfer_->finish();
  }
  for (const auto& work : works) work->note_launched(stream);
}

void NcclWork::note_launched(const c10::Stream& stream) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    if (state_ != LaunchState::queued) return;
    end_.emplace(device_.type());
    end_->record(stream);
    stream_ = stream;
    state_ = LaunchState::launched;
    future = future_;
  }
  changed_.notify_all();
  if (future != nullptr) complete(std::move(future));
}

/// Not on the calling thread, which may be the one that launches all messages of the device, or
/// hold locks: a callback may wait for another call, or never return.
void NcclWork::complete(c10::intrusive_ptr<c10::ivalue::Future> future, std::exception_ptr error) {
  auto job = [self = shared_from_this(), future = std::move(future), error] {
    const WorldScope::Binding bound(self->world_.lock());
    if (error != nullptr) return future->setErrorIfNeeded(error);
    const c10::StreamGuard on(*self->stream_);
    future->markCompleted(c10::IValue(self->results_));
  };
  callbacks_ != nullptr ? callbacks_->run(std::move(job))
                        : CallbackExecutor::of_process().run(std::move(job));
}

void NcclWork::fail(std::exception_ptr error) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == LaunchState::failed) return;
    if (state_ == LaunchState::queued) future = future_;
    state_ = LaunchState::failed;
    error_ = error;
  }
  changed_.notify_all();
  if (future != nullptr) complete(std::move(future), error);
}

void NcclWork::throw_failure() {
  failure_->show();
  std::rethrow_exception(error_);
}

/// Returns false at the limit. If late calls fail by nothing else (no error handling), the
/// call's own timeout ends it.
bool NcclWork::await_launch(std::unique_lock<std::mutex>& lock, TimePoint limit) {
  const auto grace = tunables().nccl_end_grace;
  const auto own =
      terms_.deadline < TimePoint::max() - grace ? terms_.deadline + grace : TimePoint::max();
  while (state_ == LaunchState::queued) {
    const auto now = steady_clock().now();
    if (now >= limit) return false;
    if (now >= own && !failure_->failed())
      throw DistBackendError(terms_.name + " (backend nccl) was not begun within its timeout, " +
                                 describe(terms_.timeout) +
                                 (terms_.other_end.empty() ? "" : ": " + why_not_launched()),
                             Code::timed_out);
    changed_.wait_for(lock, std::min(tunables().nccl_look, std::min(limit, own) - now));
  }
  return true;
}

void NcclWork::wait_until_launched() {
  post_open_batches();
  std::unique_lock lock(mutex_);
  await_launch(lock, TimePoint::max());
  if (state_ == LaunchState::failed) throw_failure();
}

bool NcclWork::is_launched() const {
  const std::lock_guard lock(mutex_);
  return state_ == LaunchState::launched;
}

std::string NcclWork::why_not_launched() const {
  switch (stage_) {
    case MessageStage::held:
      return "the thread that launches its device's messages had not got to it";
    case MessageStage::posted: return terms_.other_end;
    case MessageStage::met: break;
  }
  return "both ranks had called, and it had not had its turn among the messages of its device";
}

bool NcclWork::is_done() {
  const std::lock_guard lock(mutex_);
  if (state_ != LaunchState::launched) return false;
  return captured_ || query(*end_);
}

bool NcclWork::is_ready() {
  const std::lock_guard lock(mutex_);
  return captured_ || state_ == LaunchState::failed || query(*ready_);
}

bool NcclWork::query(c10::Event& event) {
  try {
    return event.query();
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const c10::Error*>(&error);
    device_error_ = known != nullptr ? known->what_without_backtrace() : error.what();
    return false;
  }
}

std::string NcclWork::device_error() const {
  const std::lock_guard lock(mutex_);
  return device_error_;
}

void NcclWork::wait_until_done(std::optional<Duration> timeout) {
  const auto deadline = timeout ? deadline_after(steady_clock(), *timeout) : TimePoint::max();
  const auto grace = tunables().nccl_end_grace;  // for calls that nobody aborts
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (state_ == LaunchState::failed) throw_failure();
    }
    if (is_done()) {
      // Aborted work looks done too. A failure is noted before anything is aborted.
      if (!failure_->failed() || is_released()) return;
      const auto why = failure_->why();
      failure_->show();
      throw DistBackendError(why.message(), why.code(), why.ranks());
    }
    if (const auto error = device_error(); !error.empty())
      throw DistBackendError(terms_.name + " (backend nccl): its device reports: " + error,
                             Code::internal);
    if (terms_.deadline < TimePoint::max() - grace &&
        steady_clock().now() >= terms_.deadline + grace)
      throw DistBackendError(terms_.name + " (backend nccl) was not done within its timeout, " +
                                 describe(terms_.timeout),
                             Code::timed_out);
    if (steady_clock().now() >= deadline)
      throw DistBackendError(terms_.name + " was not done within the " + describe(*timeout) +
                                 " that wait() was given; it goes on",
                             Code::timed_out);
    std::this_thread::sleep_for(tunables().nccl_poll);
  }
}

void NcclWork::release() {
  // Ends without the lock: tensors may run the program's code.
  std::optional<NcclTransfer> released;
  const std::lock_guard lock(mutex_);
  released.swap(transfer_);
}

bool NcclWork::is_released() const {
  const std::lock_guard lock(mutex_);
  return !transfer_.has_value();
}

bool NcclWork::is_completed() {
  const std::lock_guard lock(mutex_);
  return state_ != LaunchState::queued;
}

bool NcclWork::is_success() {
  const std::lock_guard lock(mutex_);
  if (state_ == LaunchState::failed) failure_->show();
  return state_ == LaunchState::launched;
}

bool NcclWork::wait(std::optional<Duration> timeout) {
  post_open_batches();
  {
    std::unique_lock lock(mutex_);
    if (!await_launch(lock,
                      timeout ? deadline_after(steady_clock(), *timeout) : TimePoint::max())) {
      throw DistBackendError(terms_.name + " was not begun within the " + describe(*timeout) +
                                 " that wait() was given; it goes on",
                             Code::timed_out);
    }
    if (state_ == LaunchState::failed) throw_failure();
    const auto current = current_stream(device_);
    if (current != *stream_) end_->block(current);
  }
  if (terms_.blocking_wait && !captured_) wait_until_done(timeout);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> NcclWork::get_future() {
  LaunchState state;
  {
    const std::lock_guard lock(mutex_);
    if (future_ != nullptr) return future_;
    group::check(CallbackExecutor::of_process().prepare());
    if (terms_.callbacks != nullptr) callbacks_ = CallbackLane::of_this_job();
    if (callbacks_ == nullptr) callbacks_ = terms_.callbacks;
    world_ = WorldScope::current();
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device_});
    state = state_;
  }
  if (state == LaunchState::launched) {
    const c10::StreamGuard on(*stream_);
    future_->markCompleted(c10::IValue(results_));
  } else if (state == LaunchState::failed) {
    failure_->show();
    future_->setErrorIfNeeded(error_);
  }
  return future_;
}

int NcclWork::source_rank() { return is_completed() ? terms_.source : -1; }

std::exception_ptr NcclWork::exception() {
  const std::lock_guard lock(mutex_);
  if (state_ != LaunchState::failed) return nullptr;
  failure_->show();
  return error_;
}

std::vector<at::Tensor> NcclWork::result() { return results_; }

}  // namespace muster::nccl
