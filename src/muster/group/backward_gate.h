/// When the callbacks of futures run that are asked for in a backward pass: after its last call.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "muster/base/callback_executor.h"
#include "muster/base/thread_rest.h"

namespace c10::ivalue {
struct Future;
}

namespace muster::group {

/// A communication hook of data parallel training starts a call for every bucket, from the thread
/// in backward, and its callbacks may start more: which came first would be another on every rank.
/// So callbacks of one pass wait until all its hooks have been called; those of a pass inside
/// another (reentrant checkpoints) wait for the outer one. Where the thread in backward waits for
/// one of the futures itself they wait no longer: it does so on every rank. It counts as waiting
/// too where it sleeps for 20 ms on anything without a limit of time, polls between short sleeps
/// for 500 ms, or starts no call for 10 s. Callbacks of failed calls do not wait. Thread-safe.
class BackwardGate final : public CallbackExecutor::Watched,
                           public std::enable_shared_from_this<BackwardGate> {
 public:
  /// Of the backward pass that the calling thread is in; null outside of one, and where it is open.
  static std::shared_ptr<BackwardGate> of_this_pass();
  /// The calling thread, in a backward pass, is about to wait for futures of it.
  static void open_this_pass();

  explicit BackwardGate(int pass) : pass_(pass), rest_(ThreadRest::this_thread()) {}
  /// At once where it is open, else when it opens, in the order in which they come. `job` must not
  /// block; it completes `future`.
  void run(CallbackExecutor::Job job, const c10::ivalue::Future* future);
  void open();
  /// The pass is over.
  void end();
  bool look(TimePoint now) override;
  /// The thread in backward stands still until it is seen to wait.
  Duration period() const override;

 private:
  const int pass_;  // autograd's number
  std::mutex lock_;
  ThreadRest rest_;  // of the thread in backward
  TimePoint latest_call_{};
  bool is_open_ = false;
  std::shared_ptr<BackwardGate> outer_;  // once this pass is over, where it was inside another
  struct Held {
    CallbackExecutor::Job job;
    const c10::ivalue::Future* future;
  };
  std::vector<Held> held_;
};

}  // namespace muster::group
