// SPDX-License-Identifier: BSD-3-Clause
/// A Work of a call of the group, followed by a computation of this process that makes the results.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "muster/work.h"

namespace muster::group {

/// The first thread that sees the end of the call computes: one that asks or waits, or the thread
/// of its future's callbacks, so that results appear even if the Work is dropped.
class FollowingWork final : public Work, public std::enable_shared_from_this<FollowingWork> {
 public:
  /// `finish` runs once, after `call` has succeeded; its exception becomes the Work's error.
  static std::shared_ptr<FollowingWork> create(WorkRef call, std::function<void()> finish,
                                               TensorList tensors);

  bool is_completed() override;
  bool is_success() override { return is_completed() && error_ == nullptr; }
  bool wait(std::optional<Duration> timeout = {}) override;
  c10::intrusive_ptr<c10::ivalue::Future> get_future() override { return future_; }
  int source_rank() override { return -1; }
  std::exception_ptr exception() override { return is_completed() ? error_ : nullptr; }
  std::vector<at::Tensor> result() override { return tensors_; }

 private:
  FollowingWork(WorkRef call, std::function<void()> finish, TensorList tensors);
  /// Requires that the call has ended. Returns once the results are there.
  void follow();

  const WorkRef call_;
  const TensorList tensors_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::once_flag once_;
  std::function<void()> finish_;  // released by the thread that runs it
  std::exception_ptr error_;      // written before completed_
  std::atomic<bool> completed_{false};
};

}  // namespace muster::group
