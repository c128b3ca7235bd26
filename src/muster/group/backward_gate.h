/// When the callbacks of futures run that are asked for in a backward pass: after its last call.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "muster/base/callback_executor.h"
#include "muster/base/thread_rest.h"

namespace muster::group {

/// A communication hook of data parallel training starts a call for every bucket, from the thread
/// in backward, and its callbacks may start more: which came first would be another on every rank.
/// So callbacks of one pass wait until all its hooks have been called. Where the thread in backward
/// stands still itself, sleeping for 20 ms, polling between short sleeps for 500 ms, or starting no
/// call for 10 s, it may wait for one of them: then they wait no longer. Neither do those of failed
/// calls. A backward pass inside another (reentrant checkpoints) has a gate of its own.
/// Thread-safe.
class BackwardGate final : public CallbackExecutor::Watched,
                           public std::enable_shared_from_this<BackwardGate> {
 public:
  /// Of the backward pass that the calling thread is in; null outside of one, and where it is open.
  static std::shared_ptr<BackwardGate> of_this_pass();
  /// The calling thread is about to wait for futures of its pass.
  static void open_on_this_thread();

  explicit BackwardGate(int pass) : pass_(pass), rest_(ThreadRest::this_thread()) {}
  /// At once where it is open, else when it opens, in the order in which they come. `job` must not
  /// block.
  void run(CallbackExecutor::Job job);
  void open();
  bool look(TimePoint now) override;

 private:
  const int pass_;  // autograd's number
  std::mutex lock_;
  ThreadRest rest_;  // of the thread in backward
  TimePoint latest_call_{};
  bool is_open_ = false;
  std::vector<CallbackExecutor::Job> held_;
};

}  // namespace muster::group
