// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/work/following_work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <chrono>

#include "core/wait/callbacks.h"

namespace muster::group {
namespace {

/// How long a wait for the results also waits for the future, as `NativeWork` does: callbacks of
/// earlier calls may come first.
constexpr auto kFutureLimit = std::chrono::milliseconds(100);  // limit: delay of a callback

}  // namespace

FollowingWork::FollowingWork(WorkRef call, std::function<void()> finish, TensorList tensors)
    : call_(std::move(call)),
      tensors_(std::move(tensors)),
      future_(
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))),
      finish_(std::move(finish)) {}

std::shared_ptr<FollowingWork> FollowingWork::create(WorkRef call, std::function<void()> finish,
                                                     TensorList tensors) {
  const std::shared_ptr<FollowingWork> work(
      new FollowingWork(std::move(call), std::move(finish), std::move(tensors)));
  // The first callback: the future is complete, and those of its users are about to run.
  work->future_->addCallback([weak = work->weak_from_this()](c10::ivalue::Future&) {
    const auto self = weak.lock();
    if (!self) return;
    {
      const std::lock_guard guard(self->lock_);
      self->future_ended_ = true;
    }
    self->future_end_.notify_all();
  });
  work->call_->get_future()->addCallback([work](c10::ivalue::Future& call) {
    work->follow(call.exception_ptr());
    work->complete_future();
  });
  return work;
}

/// On the thread of the callbacks alone, so that those of several calls keep their order.
void FollowingWork::complete_future() {
  if (error_ != nullptr)
    future_->setError(error_);
  else
    future_->markCompleted(c10::IValue(tensors_));
}

/// Asks the call for its failure rather than wait for it: a wait would let callbacks run in the
/// middle of a backward pass, which the program does only where it waits on every rank. But what a
/// wait or the future has said about the failure may say more.
void FollowingWork::follow(const std::exception_ptr& said) {
  std::call_once(once_, [&] {
    try {
      if (const auto failure = call_->exception(); failure != nullptr)
        std::rethrow_exception(said != nullptr ? said : failure);
      finish_();
    } catch (...) {
      error_ = std::current_exception();
    }
    finish_ = nullptr;
    completed_.store(true, std::memory_order_release);
  });
}

bool FollowingWork::is_completed() {
  if (completed_.load(std::memory_order_acquire)) return true;
  if (call_->is_completed() && !posted_.exchange(true))
    CallbackExecutor::of_process().run([self = shared_from_this()] { self->follow(nullptr); });
  return completed_.load(std::memory_order_acquire);
}

bool FollowingWork::wait(std::optional<Duration> timeout) {
  std::exception_ptr said;
  try {
    call_->wait(timeout);  // lets its callbacks go on too, which complete the future
  } catch (...) {
    if (!call_->is_completed()) throw;  // the call goes on
    said = std::current_exception();
  }
  follow(said);
  wait_for_future();
  if (error_ != nullptr) std::rethrow_exception(error_);
  return true;
}

/// After a wait, the future should be complete too. In a callback it may have to wait for this very
/// callback.
void FollowingWork::wait_for_future() {
  std::unique_lock guard(lock_);
  if (future_ended_) return;
  guard.unlock();
  if (CallbackLane::of_this_job() != nullptr) return;
  guard.lock();
  future_end_.wait_for(guard, kFutureLimit, [this] { return future_ended_; });
}

}  // namespace muster::group
