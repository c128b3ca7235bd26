/// The collectives of one communicator. They are numbered when they are called, and any waiting
/// thread runs them in that order. Over links, consecutive small calls with disjoint memory are
/// pipelined: the messages that one pass sends to a peer leave in one write per link
/// (`core/transport/link/send_batch.h`), and the calls complete in order.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "core/collective/call.h"
#include "core/collective/communicator.h"
#include "core/collective/control.h"
#include "core/collective/links/link_group.h"
#include "core/collective/operation.h"
#include "core/collective/operation_list.h"
#include "core/collective/queue/driver.h"
#include "core/collective/region_group.h"
#include "core/tunables/tunables.h"

namespace muster::collective {

class InlineCall;

class CollectiveQueue {
 public:
  /// `region` is null if the group runs over links, with the algorithms that `bounds` select.
  CollectiveQueue(const GroupContext& group, std::unique_ptr<RegionGroup> region,
                  const Selection::Bounds& bounds);

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
  OperationList calls_;
  CallCache<transport::Fingerprint> call_cache_;  // protected by the drive lock
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

}  // namespace muster::collective
