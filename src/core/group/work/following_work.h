// SPDX-License-Identifier: BSD-3-Clause
/// A Work of a call of the group, followed by a computation of this process that makes the results.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "muster/work.h"

namespace muster::group {

/// A thread that waits computes, or the thread of the callbacks of the call's future, so that
/// results appear even if the Work is dropped. A thread that only asks never computes: it has an
/// executor's thread do so.
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
  /// Requires that the call has ended. Returns once the results are there. `said`: what the call
  /// has said about its failure, if it has been asked.
  void follow(const std::exception_ptr& said);
  void complete_future();
  void wait_for_future();

  const WorkRef call_;
  const TensorList tensors_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::once_flag once_;
  std::function<void()> finish_;  // released by the thread that runs it
  std::exception_ptr error_;      // written before completed_
  std::atomic<bool> completed_{false};
  std::atomic<bool> posted_{false};  // an executor's thread computes, or will
  std::mutex lock_;                  // guards the next
  bool future_ended_ = false;        // its callbacks are about to run, or have
  std::condition_variable future_end_;
};

}  // namespace muster::group
