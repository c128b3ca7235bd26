// SPDX-License-Identifier: BSD-3-Clause
/// Delays callbacks of futures requested in a backward pass until the pass has made its last call.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "core/wait/callbacks.h"

namespace c10::ivalue {
struct Future;
}

namespace muster::group {

/// A communication hook of data-parallel training starts one call per bucket from the thread in
/// backward, and their callbacks may start further calls. If callbacks ran immediately, the order
/// of calls would differ between ranks. So the callbacks of a pass wait until all its hooks have
/// been called; those of a nested pass (reentrant checkpointing) wait for the outer one.
///
/// If the thread in backward waits for one of the futures, callbacks stop waiting, because it does
/// so on every rank. The thread also counts as waiting if it sleeps without a time limit for 20 ms,
/// polls with short sleeps for 500 ms, or starts no call for 10 s. Callbacks of failed calls are
/// not delayed. Thread-safe.
class BackwardGate final : public CallbackExecutor::WatchedQueue,
                           public std::enable_shared_from_this<BackwardGate> {
 public:
  /// The gate of the calling thread's backward pass; null outside a pass and if the gate is open.
  static std::shared_ptr<BackwardGate> of_this_pass();
  /// Call before the calling thread, in a backward pass, waits for futures of that pass.
  static void open_this_pass();

  explicit BackwardGate(int pass) : pass_(pass), rest_(ThreadRest::this_thread()) {}
  /// Runs `job` immediately if the gate is open, otherwise when it opens, in order of arrival.
  /// `job` must not block; it completes `future`.
  void run(CallbackExecutor::Job job, const c10::ivalue::Future* future);
  void open();
  /// Call when the pass is over.
  void end();
  bool look(TimePoint now) override;
  /// Interval for checking whether the thread in backward waits.
  Duration period() const override;

 private:
  const int pass_;  // autograd's id of the pass
  // Guards all below. Jobs run under it, in order, and so may not block. The gate of an enclosing
  // pass may be taken under it, never the reverse.
  std::mutex lock_;
  ThreadRest rest_;  // sleep state of the thread in backward
  TimePoint latest_call_{};
  bool is_open_ = false;
  std::shared_ptr<BackwardGate> outer_;  // set once this pass is over, if it was nested
  struct Held {
    CallbackExecutor::Job job;
    const c10::ivalue::Future* future;
  };
  std::vector<Held> held_;
};

}  // namespace muster::group
