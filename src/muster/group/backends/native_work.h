/// The Work of the native backend: a pending call of the engine and the tensors it works on.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "muster/collective/communicator.h"
#include "muster/group/backends/staging.h"
#include "muster/group/work.h"
#include "muster/trace/recorder.h"

namespace muster::group {

/// Of tensors on an accelerator it is completed once its outputs' copies are enqueued: they are usable on the stream that was current where
/// the call was made, and after `wait` on the caller's current one.
class NativeWork : public Work, public std::enable_shared_from_this<NativeWork> {
 public:
  NativeWork(std::string_view name, Staging staging, std::shared_ptr<collective::Communicator> communicator,
             std::shared_ptr<const std::vector<int>> ranks, std::shared_ptr<std::atomic<bool>> shown, trace::Mark mark);
  /// Once: what was started on `staging().args()`. From then on the call holds this Work until it is done.
  void track(collective::PendingRef pending);
  const Staging& staging() const { return staging_; }

  bool is_completed() override;
  bool is_success() override;
  bool wait(std::optional<Duration> timeout = {}) override;
  c10::intrusive_ptr<c10::ivalue::Future> get_future() override;
  int source_rank() override;
  std::exception_ptr exception() override;
  std::vector<at::Tensor> result() override { return staging_.outputs(); }

 private:
  /// The user sees what it failed with.
  void show_error() { *shown_ = true; }
  void end(c10::ivalue::Future& future);
  /// Runs what is left to do after the engine is done, once; others that come meanwhile wait for it.
  void complete(const Status& status);

  std::string_view name_;
  std::shared_ptr<collective::Communicator> communicator_;  // until it is completed
  std::shared_ptr<const std::vector<int>> ranks_;           // of the default group, by position
  std::shared_ptr<std::atomic<bool>> shown_;                // whether anybody has seen a failure of the group
  collective::PendingRef pending_;

  std::atomic<bool> completed_{false};
  std::mutex mutex_;
  Staging staging_;           // its finish() under mutex_
  trace::Mark mark_;          // told once, under mutex_
  std::exception_ptr error_;  // written before completed_
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace muster::group
