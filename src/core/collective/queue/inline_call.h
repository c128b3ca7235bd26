/// A blocking collective driven by its caller's thread. As long as no thread drives the group and
/// nothing is queued, the call needs no queue entry.
#pragma once

#include <mutex>
#include <utility>

#include "core/base/time/task.h"
#include "core/collective/queue/collective_queue.h"
#include "core/collective/starting_call.h"

namespace muster::collective {

/// Used by one thread, on whose stack it lives.
class InlineCall final : public StartingCall {
 public:
  /// Takes the drive lock and the next number if both are available.
  InlineCall(CollectiveQueue& queue, const Args& args, CallRecord& record)
      : StartingCall(record, &queue.control_), queue_(queue), args_(args) {
    const std::uint64_t number = queue.calls_.state().try_lock_as_next();
    if (number == 0) return;
    lock_ = std::unique_lock(queue.calls_.state(), std::adopt_lock);
    assign(queue.call_cache_(signature_of(args), [&args] { return fingerprint_of(args, 0); }),
           number);
  }

  /// Whether it holds the lock.
  bool holds_lock() const { return lock_.owns_lock(); }
  void release_lock() { lock_.unlock(); }
  /// Call before the start: processes received notes. Returns false if the group has failed.
  bool check_notes() {
    if (queue_.control_.news()) [[unlikely]]
      queue_.control_.poll();
    return !queue_.group_.channel->failed();
  }
  /// Starts the call as a task, if the group has no other work, and drives it for a bounded time.
  /// Returns true if it completed successfully; otherwise `release_task` has the rest.
  bool run_bounded(Driver& driver);
  /// Invalid if the call has not begun.
  Task<Status> release_task() { return std::move(task_); }

 private:
  bool run_over_links();
  bool run_in_region();

  CollectiveQueue& queue_;
  const Args& args_;
  std::unique_lock<QueueState> lock_;
  Task<Status> task_;
};

}  // namespace muster::collective
