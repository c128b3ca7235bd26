// SPDX-License-Identifier: BSD-3-Clause
/// A `collective::Communicator`, muster's own engine or MPI, as a backend: passes tensors to it as
/// spans.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/collective/communicator.h"
#include "core/group/backends/staging.h"
#include "core/group/call/call.h"
#include "core/group/group_core.h"
#include "core/group/work/backward_gate.h"
#include "core/group/world.h"
#include "core/trace/recorder.h"
#include "core/wait/callbacks.h"
#include "muster/work.h"

namespace muster::group {

/// Shared by the calls of one backend.
struct NativeContext {
  std::shared_ptr<collective::Communicator> communicator;
  std::shared_ptr<const std::vector<int>> ranks;  ///< ranks of the default group, by group rank
  std::shared_ptr<std::atomic<bool>> shown;       ///< whether a failure of the group has been shown
  /// Serialises the completion of collectives' futures.
  std::shared_ptr<CallbackLane> callbacks = {};
};

/// The native backend's Work: a pending call of the engine and its tensors. For accelerator
/// tensors, it completes once the copies of its outputs are enqueued. The outputs can be used on
/// the stream that was current when the call was made and, after `wait`, on the caller's current
/// stream.
class NativeWork : public Work, public std::enable_shared_from_this<NativeWork> {
 public:
  static std::shared_ptr<NativeWork> create(Call call, NativeContext context);
  /// The call, for the thread that starts it; only before `track`.
  Call& given() { return call_; }
  /// Call once with the started call, which then holds this Work until it is done.
  void track(collective::PendingRef pending);

  bool is_completed() override;
  bool is_success() override;
  bool wait(std::optional<Duration> timeout = {}) override;
  c10::intrusive_ptr<c10::ivalue::Future> get_future() override;
  int source_rank() override;
  std::exception_ptr exception() override;
  std::vector<at::Tensor> result() override;

 private:
  /// Completes a requested future, whose callbacks are user code.
  struct Delivery;

  NativeWork(Call call, NativeContext context);
  /// The accelerator's copies, or null.
  const DeviceCopies* device() const;
  void settle(const Status& status);
  bool try_finish(const Status& status);
  void finish(const Status& status);
  bool wait_until_completed(TimePoint deadline);
  [[noreturn]] void throw_timeout(Duration timeout, const Status& status) const;
  /// Records that the user sees the error.
  void show_error() { *context_.shown = true; }
  void deliver(const std::shared_ptr<Delivery>& delivery);
  void post(const std::shared_ptr<Delivery>& delivery);
  void wait_for_future();
  void end(c10::ivalue::Future& future);

  NativeContext context_;  // holds its communicator until completed
  collective::PendingRef pending_;
  Call call_;
  trace::Mark mark_;          // of the recorded call
  std::exception_ptr error_;  // written before completed_
  // Set by the thread that finishes the call after the engine is done. That thread alone changes
  // `context_`, `call_`, `mark_` and `error_`; others read them once they see `completed_`.
  std::atomic<bool> claimed_{false};
  std::atomic<bool> completed_{false};  // finished; set under mutex_
  std::mutex mutex_;                    // no user code runs under it
  std::condition_variable completion_;
  // Set once there is a future, under mutex_. Both `finish` and `get_future` look at the other's
  // mark there, so one of them completes the future.
  std::shared_ptr<Delivery> delivery_;
};

/// Supports every operation and dtype. CPU tensors that are not contiguous are copied to contiguous
/// memory, accelerator tensors to pinned host memory.
class NativeBackend : public SpanBackend {
 public:
  /// `name` is the requested name: native, gloo, tcp or mpi. `ranks` are ranks of the default
  /// group, indexed by rank of the communicator.
  NativeBackend(std::string name, std::shared_ptr<collective::Communicator> communicator,
                std::vector<int> ranks);

  const BackendCapabilities& capabilities() const override { return capabilities_; }
  bool supports(Op op, at::ScalarType dtype, c10::DeviceType device,
                std::string* why) const override;
  WorkRef submit(BackendCall& call) override;
  std::shared_ptr<void> scope(BackendScope kind) override;
  BackendState state() const override;
  Status close(TimePoint deadline) override { return communicator_->close(deadline); }
  void abort(const std::string& reason) override { communicator_->abort(reason); }

  const std::shared_ptr<collective::Communicator>& communicator() const { return communicator_; }

 private:
  WorkRef submit_async(Call& call);
  WorkRef refuse(const Call& call);
  std::shared_ptr<void> manual_progress();
  /// Throws `status`. If the engine found the arguments invalid, the other members are told, as for
  /// any refused call.
  [[noreturn]] void fail(Call& call, const Status& status);

  const std::string name_;
  std::shared_ptr<collective::Communicator> communicator_;
  const BackendCapabilities capabilities_;
  const std::shared_ptr<const std::vector<int>> ranks_;
  std::atomic<bool> refused_{false};
  const std::shared_ptr<CallbackLane> callbacks_ = std::make_shared<CallbackLane>();
  const std::shared_ptr<std::atomic<bool>> shown_ =
      std::make_shared<std::atomic<bool>>(false);  // shared with the Works
};

}  // namespace muster::group
