/// The collectives of one communicator: numbered when they are called, run in that order by whoever
/// waits. Over links, small calls that stand behind one another and share no memory are under way
/// together: what one pass over them sends leaves in one write for each link
/// (`transport/send_batch.h`), and they end in their order.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "muster/base/tunables.h"
#include "muster/collective/call.h"
#include "muster/collective/communicator.h"
#include "muster/collective/control.h"
#include "muster/collective/driver.h"
#include "muster/collective/link_group.h"
#include "muster/collective/operation.h"
#include "muster/collective/operation_list.h"
#include "muster/collective/region_group.h"

namespace muster::collective {

class InlineCall;

class CollectiveQueue {
 public:
  /// `region` is null where the group runs over links, with the algorithms that `bounds` say.
  CollectiveQueue(const GroupContext& group, std::unique_ptr<RegionGroup> region,
                  const Selection::Bounds& bounds);

  /// A valid call whose caller waits for it, after those before it; where it has had its turn as
  /// an `InlineCall`, it goes on from there.
  Status run(Driver& driver, const Args& args, CallRecord& record, InlineCall& begun);
  /// Queues a valid call, which holds `owner` until it is over. Throws nothing once it is queued.
  /// `beside`: another thread than this one has promised to drive calls, and knows nothing of this
  /// one.
  std::shared_ptr<Operation> start(std::shared_ptr<Driver> driver, Args args, CallRecord& record,
                                   std::shared_ptr<void> owner, bool beside);
  /// Queues the news that this member's next call, an `op`, was refused; its number.
  std::uint64_t refuse(std::shared_ptr<Driver> driver, Op op);

  /// Goes on as far as it can, unless another thread is doing that just now; what is thrown
  /// meanwhile fails the group. `waiting` threads wait for the group; `self` is how many of them
  /// this one is, 1 or 0.
  void advance(const std::atomic<int>& waiting, int self);
  bool empty() const { return !calls_.state().queued(); }
  /// Whether a call that was started `beside` is under way.
  bool has_calls_beside() const { return beside_.load(std::memory_order_relaxed) > 0; }
  /// Of the latest call.
  std::uint64_t number() const { return calls_.state().number(); }
  /// Grows when a call is added that the waiting threads' limits do not know of.
  std::uint64_t additions() const { return additions_.load(std::memory_order_relaxed); }
  const GroupContext& group() const { return group_; }
  /// Null over links.
  RegionGroup* region() const { return region_.get(); }

  /// The earliest of the queued calls; max where none can be missed any more.
  TimePoint next_deadline();
  /// Fails the channel where a call is past its deadline, naming the ranks that the running one
  /// waits for.
  void check_deadlines(TimePoint now);
  /// Tells the members that the running call has waited for long what it is.
  void remind(TimePoint now);
  /// The thread that waits for a call is being ended: takes it out. No other may be in it then.
  void abandon(Operation& operation);

  /// Calls `work(control)` under the drive lock; false, without calling it, where another thread
  /// holds that now.
  template <class Work>
  bool with_control(Work work) {
    const std::unique_lock drive(calls_.state(), std::try_to_lock);
    if (!drive.owns_lock()) return false;
    control_.poll();
    work(control_);
    return true;
  }
  /// Orderly end: lets go of the region.
  void drop_region();

 private:
  friend class InlineCall;
  struct Ended;
  Status wait_for(Driver& driver, const Operation& operation);
  void drive_pass(Ended& ended, int self);
  void begin(Operation& operation, LinkGroup& links);
  void pipeline(const Operation& first);
  const OutstandingTransfers& outstanding();
  bool comes_to_rest(Operation& operation);
  Status outcome(Operation& operation);
  void finish(Operation& operation, Ended& ended);
  bool waits_for_one_that_left();
  std::vector<int> awaited();
  std::string late_text(const Operation& late, TimePoint now, const trace::PeerReport& known);

  const GroupContext& group_;
  OperationList calls_;
  CallCache<transport::Fingerprint> call_cache_;  // under the drive lock
  Control control_;
  const Selection selection_;  // over links
  LinkGroup links_;            // of the call that began as the first in the queue
  std::array<std::unique_ptr<LinkGroup>, fixed::kInFlight>
      pipelined_;  // of the others, by sequence; made when first used
  std::unique_ptr<RegionGroup> region_;
  bool broken_ = false;  // a call has failed
  std::atomic<std::uint64_t> additions_{0};
  std::atomic<int> beside_{0};
};

}  // namespace muster::collective
