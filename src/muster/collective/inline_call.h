/// A blocking collective in the hands of its caller's thread: while nobody drives the group and
/// nothing is queued, it needs no place in the queue.
#pragma once

#include <mutex>
#include <utility>

#include "muster/base/task.h"
#include "muster/collective/collective_queue.h"
#include "muster/collective/starting_call.h"

namespace muster::collective {

/// Used by one thread, on whose stack it stands.
class InlineCall final : public StartingCall {
 public:
  /// Takes the drive lock and the next number where both are to be had.
  InlineCall(CollectiveQueue& queue, const Args& args, CallRecord& record)
      : StartingCall(record, &queue.control_), queue_(queue), args_(args) {
    const std::uint64_t number = queue.calls_.state().try_lock_as_next();
    if (number == 0) return;
    turn_ = std::unique_lock(queue.calls_.state(), std::adopt_lock);
    take(queue.call_cache_(signature_of(args), [&args] { return fingerprint_of(args, 0); }),
         number);
  }

  /// It holds the lock.
  bool has_turn() const { return turn_.owns_lock(); }
  void end_turn() { turn_.unlock(); }
  /// Before it starts: the notes that have come are read. False where the group has failed.
  bool may_start() {
    if (queue_.control_.news()) [[unlikely]]
      queue_.control_.poll();
    return !queue_.group_.channel->failed();
  }
  /// A call that is more than a line, where nothing else of the group is to be done meanwhile: its
  /// first moment. True: it is over, with success. Else `take_task` has what is left.
  bool run_first_steps(Driver& driver);
  /// Not valid where it has not begun.
  Task<Status> take_task() { return std::move(task_); }

 private:
  bool over_links();
  bool in_region();

  CollectiveQueue& queue_;
  const Args& args_;
  std::unique_lock<QueueState> turn_;
  Task<Status> task_;
};

}  // namespace muster::collective
