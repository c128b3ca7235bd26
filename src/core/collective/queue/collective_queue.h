// SPDX-License-Identifier: BSD-3-Clause
/// The collectives of one communicator. They are numbered when they are called, and any waiting
/// thread runs them in that order. Over links, consecutive small calls with disjoint memory are
/// pipelined: the messages that one pass sends to a peer leave in one write per link
/// (`core/transport/link/send_batch.h`), and the calls complete in order.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/base/time/task.h"
#include "core/collective/call.h"
#include "core/collective/communicator.h"
#include "core/collective/control.h"
#include "core/collective/links/link_group.h"
#include "core/collective/operation.h"
#include "core/collective/queue/driver.h"
#include "core/collective/region_group.h"
#include "core/tunables/tunables.h"

namespace muster::collective {

class InlineCall;
struct GroupDescriptor;

class CollectiveQueue {
 public:
  /// `region` is null if the group runs over links, as `descriptor` tells.
  CollectiveQueue(const GroupContext& group, std::unique_ptr<RegionGroup> region,
                  const GroupDescriptor& descriptor);

  /// Runs a valid call after all earlier ones; the caller waits. If the call has been started as an
  /// `InlineCall`, it continues from there.
  Status run(Driver& driver, const Args& args, CallRecord& record, InlineCall& started_inline);
  /// Queues a valid call, which holds `owner` until it has ended. Does not throw once the call is
  /// queued. `unknown_to_driver`: a different thread has promised to drive calls and does not know
  /// about this one.
  std::shared_ptr<Operation> start(std::shared_ptr<Driver> driver, Args args, CallRecord& record,
                                   std::shared_ptr<void> owner, bool unknown_to_driver);
  /// Queues a notice that this member's next call, an `op`, was refused. Returns its number.
  std::uint64_t refuse(std::shared_ptr<Driver> driver, Op op);

  /// Runs the queue as far as possible, unless another thread is doing that. An exception fails the
  /// group. `waiting`: number of threads that wait for the group; `self`: how many of them this
  /// thread is, 1 or 0.
  void advance(const std::atomic<int>& waiting, int self);
  bool empty() const { return !calls_.state().queued(); }
  /// Whether a call started with `unknown_to_driver` is outstanding.
  bool has_calls_unknown_to_driver() const {
    return unknown_to_driver_.load(std::memory_order_relaxed) > 0;
  }
  /// Number of the latest call.
  std::uint64_t number() const { return calls_.state().number(); }
  /// Incremented when a call is added whose deadline the waiting threads do not know.
  std::uint64_t additions() const { return additions_.load(std::memory_order_relaxed); }
  const GroupContext& group() const { return group_; }
  /// Null over links.
  RegionGroup* region() const { return region_.get(); }

  /// The earliest deadline of the queued calls; max if none can be missed any more.
  TimePoint next_deadline();
  /// Fails the channel if a call is past its deadline. The error names the ranks that the running
  /// call waits for.
  void check_deadlines(TimePoint now);
  /// If the running call has waited long enough, tells the awaited members which call it is.
  void remind(TimePoint now);
  /// Removes a call whose waiting thread is being terminated. No other thread may be in it.
  void abandon(Operation& operation);

  /// Calls `work(control)` under the drive lock. Returns false without calling it if another thread
  /// holds the lock.
  template <class Work>
  bool with_control(Work work) {
    const std::unique_lock drive(calls_.state(), std::try_to_lock);
    if (!drive.owns_lock()) return false;
    control_.poll();
    work(control_);
    return true;
  }
  /// Orderly end: detaches from the region.
  void drop_region();

 private:
  friend class InlineCall;
  struct Ended;
  Status wait_for(Driver& driver, const Operation& operation);
  void drive_pass(Ended& ended, int self);
  void begin(Operation& operation, LinkGroup& links);
  void pipeline(const Operation& first);
  const OutstandingTransfers& outstanding();
  bool has_quiesced(Operation& operation);
  Status outcome(Operation& operation);
  void finish(Operation& operation, Ended& ended);
  bool fail_if_awaited_left();
  std::vector<int> awaited();
  std::string deadline_text(const Operation& late, TimePoint now, const trace::PeerReport& known);

  const GroupContext& group_;
  OperationList calls_;  // has the drive lock
  // From here to `broken_`: under the drive lock. `region_` is set before the first call and reset
  // after the last one.
  CallCache<transport::Fingerprint> call_cache_;
  Control control_;
  const Selection selection_;  // used over links
  LinkGroup links_;            // of the call that started at the head of the queue
  // Of the others, by sequence; created on first use.
  std::array<std::unique_ptr<LinkGroup>, fixed::kInFlight> pipelined_;
  std::unique_ptr<RegionGroup> region_;
  bool broken_ = false;  // a call has failed
  std::atomic<std::uint64_t> additions_{0};
  std::atomic<int> unknown_to_driver_{0};
};

/// A blocking collective driven by its caller's thread. As long as no thread drives the group and
/// nothing is queued, the call needs no queue entry. Used by one thread, on whose stack it lives.
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
