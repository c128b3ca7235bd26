/// The Work of the native backend: a pending call of the engine and the tensors it works on.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "muster/base/callback_lane.h"
#include "muster/collective/communicator.h"
#include "muster/group/backends/staging.h"
#include "muster/group/backward_gate.h"
#include "muster/group/call.h"
#include "muster/group/work.h"
#include "muster/group/world.h"
#include "muster/trace/recorder.h"

namespace muster::group {

/// What the calls of one backend have in common.
struct NativeContext {
  std::shared_ptr<collective::Communicator> communicator;
  std::shared_ptr<const std::vector<int>> ranks;  ///< of the default group, by position
  std::shared_ptr<std::atomic<bool>> shown;  ///< whether anybody has seen a failure of the group
  /// The order in which the futures of collectives are completed.
  std::shared_ptr<CallbackLane> callbacks = {};
};

/// Of tensors on an accelerator it is completed once its outputs' copies are enqueued: they are
/// usable on the stream that was current where the call was made, and after `wait` on the caller's
/// current one.
class NativeWork : public Work, public std::enable_shared_from_this<NativeWork> {
 public:
  static std::shared_ptr<NativeWork> create(Call call, NativeContext context);
  /// Until it is tracked, for the thread that starts it.
  Call& given() { return call_; }
  /// Once: what was started of the call. From then on that holds this Work until it is done.
  void track(collective::PendingRef pending);

  bool is_completed() override;
  bool is_success() override;
  bool wait(std::optional<Duration> timeout = {}) override;
  c10::intrusive_ptr<c10::ivalue::Future> get_future() override;
  int source_rank() override;
  std::exception_ptr exception() override;
  std::vector<at::Tensor> result() override;

 private:
  /// How a future that was asked for comes to its end: its callbacks are the user's.
  struct Delivery;

  NativeWork(Call call, NativeContext context);
  /// The accelerator's side, or null.
  const DeviceCopies* device() const;
  void settle(const Status& status);
  bool try_finish(const Status& status);
  void finish(const Status& status);
  bool wait_until_completed(TimePoint deadline);
  [[noreturn]] void throw_late(Duration timeout, const Status& status) const;
  /// The user sees what it failed with.
  void show_error() { *context_.shown = true; }
  void deliver(const std::shared_ptr<Delivery>& delivery);
  void post(const std::shared_ptr<Delivery>& delivery);
  void wait_for_future();
  void end(c10::ivalue::Future& future);

  NativeContext context_;  // its communicator until it is completed
  collective::PendingRef pending_;
  Call call_;
  trace::Mark mark_;          // of the recorded call
  std::exception_ptr error_;  // written before completed_
  // By the thread that does what is left once the engine is done.
  std::atomic<bool> claimed_{false};
  std::atomic<bool> completed_{false};  // that is done; set under mutex_
  std::mutex mutex_;                    // no code of others runs under it
  std::condition_variable completion_;
  std::shared_ptr<Delivery> delivery_;  // once there is a future
};

}  // namespace muster::group
