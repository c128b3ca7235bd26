// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/work/following_work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

namespace muster::group {

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
  work->call_->get_future()->addCallback([work](c10::ivalue::Future&) {
    work->follow();
    if (work->error_ != nullptr)
      work->future_->setError(work->error_);
    else
      work->future_->markCompleted(c10::IValue(work->tensors_));
  });
  return work;
}

void FollowingWork::follow() {
  std::call_once(once_, [this] {
    try {
      call_->wait();
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
  if (!call_->is_completed()) return false;
  follow();
  return true;
}

bool FollowingWork::wait(std::optional<Duration> timeout) {
  if (!completed_.load(std::memory_order_acquire)) {
    try {
      call_->wait(timeout);
    } catch (...) {
      if (!call_->is_completed()) throw;  // the call goes on
    }
    follow();
  }
  if (error_ != nullptr) std::rethrow_exception(error_);
  return true;
}

}  // namespace muster::group
