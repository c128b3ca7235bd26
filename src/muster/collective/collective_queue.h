/// The collectives of one communicator: numbered when they are called, run in that order by whoever
/// waits. Over links, small calls that stand behind one another and share no memory are under way
/// together: what one pass over them sends leaves in one write for each link
/// (`transport/send_batch.h`), and they end in their order.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "muster/base/task.h"
#include "muster/collective/call.h"
#include "muster/collective/communicator.h"
#include "muster/collective/completion.h"
#include "muster/collective/control.h"
#include "muster/collective/driver.h"
#include "muster/collective/link_group.h"
#include "muster/collective/queue_state.h"
#include "muster/collective/region_group.h"

namespace muster::collective {

/// From the first to behind the last byte that a call reads, or writes; empty where there is none.
struct MemoryRange {
  std::uintptr_t low = 0, high = 0;
  bool meets(const MemoryRange& other) const { return low < other.high && other.low < high; }
};

class CollectiveQueue {
 public:
  /// `region` is null where the group runs over links, with the algorithms that `bounds` say.
  CollectiveQueue(const GroupContext& group, std::unique_ptr<RegionGroup> region,
                  const Selection::Bounds& bounds);

  class Operation;

  /// Runs a valid call on this thread, after those before it.
  Status run(Driver& driver, const Args& args, Meanwhile& meanwhile);
  /// Queues a valid call, which holds `owner` until it is over. Throws nothing once it is queued.
  /// `beside`: another thread than this one has promised to drive calls, and knows nothing of this
  /// one.
  std::shared_ptr<Operation> start(std::shared_ptr<Driver> driver, Args args, TimePoint deadline,
                                   std::shared_ptr<void> owner, bool beside);
  /// Queues the news that this member's next call, an `op`, was refused.
  void refuse(std::shared_ptr<Driver> driver, Op op);

  /// Goes on as far as it can, unless another thread is doing that just now; what is thrown
  /// meanwhile fails the group. `attending` threads wait for the group; `self` is how many of them
  /// this one is, 1 or 0.
  void advance(const std::atomic<int>& attending, int self);
  bool empty() const { return !state_.queued(); }
  /// Whether a call that was started `beside` is under way.
  bool has_calls_beside() const { return beside_.load(std::memory_order_relaxed) > 0; }
  std::uint64_t sequence() const { return state_.number(); }
  /// Grows when a call is added that the waiting threads' limits do not know of.
  std::uint64_t additions() const { return additions_.load(std::memory_order_relaxed); }

  /// The earliest of the queued calls; max where none can be missed any more.
  TimePoint next_deadline();
  /// Fails the channel where a call is past its deadline, naming the ranks that the running one
  /// waits for.
  void check_deadlines(TimePoint now);
  /// Tells the members that the running call has waited for long what it is.
  void remind(TimePoint now);

  /// Calls `work(control)` under the drive lock; false, without calling it, where another thread
  /// holds that now.
  template <class Work>
  bool with_control(Work work) {
    const std::unique_lock drive(state_, std::try_to_lock);
    if (!drive.owns_lock()) return false;
    control_.poll();
    work(control_);
    return true;
  }

  /// Within a catch block: ends the group on all members with what was thrown here, in `call` where
  /// one is known; the group's failure.
  Status fail_by_exception(const transport::Fingerprint* call = nullptr) noexcept;

  /// Orderly end: lets go of the region.
  void drop_region();

 private:
  void enqueue(Operation& operation, const Args& args, bool refused = false) noexcept;
  void add(Operation& operation, bool first) noexcept;
  struct Underway;
  bool tries_express(Driver& driver, Underway& underway, const Args& args);
  bool express(Driver& driver, Underway& underway, const Args& args);
  bool over_links(Underway& underway, const Args& args);
  bool in_region(Underway& underway, const Args& args);
  Status go_on(Driver& driver, const Args& args, Underway& underway,
               std::unique_lock<QueueState> drive);
  void note_memory(Operation& operation, const Args& args) const;
  Status attend(Driver& driver, const Operation& operation);
  void remove(Operation& operation) noexcept;
  void abandon(Operation& operation);
  Operation* front();
  std::string call_text(const transport::Fingerprint& call) const;
  struct Ended;
  void pass(Ended& ended, int self);
  bool comes_to_rest(Operation& operation);
  void begin(Operation& operation, LinkGroup& links);
  void go_ahead(const Operation& first);
  const Flight& flight();
  Status outcome(Operation& operation);
  bool waits_for_one_that_left();
  std::vector<int> awaited();
  std::string late_text(const Operation& late, TimePoint now, const trace::Testimony& known);

  const GroupContext& group_;
  QueueState state_;
  Recall<transport::Fingerprint> recall_;  // under the drive lock
  Control control_;
  const Selection selection_;  // over links
  LinkGroup links_;            // of the call that began as the first in the queue
  /// Small calls that are under way at once: a batch of so many takes little longer than one.
  static constexpr std::size_t kTogether = 8;
  std::array<std::unique_ptr<LinkGroup>, kTogether>
      ahead_;  // of the others, by sequence; made when first used
  std::unique_ptr<RegionGroup> region_;
  bool broken_ = false;  // a call has failed

  std::mutex lock_;  // guards the queue: a list, so that a call takes its place without memory
  Operation* first_ = nullptr;
  Operation* last_ = nullptr;
  std::atomic<std::uint64_t> additions_{0};
  std::atomic<int> beside_{0};
};

/// One call; shared where it was started, on the stack of its thread where it blocks.
class CollectiveQueue::Operation final : public Completion {
 public:
  Operation(CollectiveQueue& queue, std::shared_ptr<Driver> driver, TimePoint deadline)
      : queue_(queue), driver_(std::move(driver)), deadline_(deadline) {}
  ~Operation() override;

  bool done() const override;
  Status wait(TimePoint deadline) override;

 private:
  friend class CollectiveQueue;
  std::shared_ptr<Driver> driver() const;

  CollectiveQueue& queue_;
  std::shared_ptr<Driver> driver_;  // of a started call, until it is over
  std::shared_ptr<void> owner_;     // of its memory, so long too
  Operation* next_ = nullptr;       // in the queue
  std::shared_ptr<Operation> self_;
  Args owned_;
  const Args* args_ = nullptr;
  transport::Fingerprint call_;
  const TimePoint deadline_;
  TimePoint made_;
  int reminders_ = 0;
  bool queued_ = false;
  bool begun_ = false;
  bool beside_ = false;
  bool counted_ = false;        // the control knows of it
  bool small_ = false;          // may be under way beside others
  MemoryRange reads_, writes_;  // where it is small
  LinkGroup* links_ = nullptr;  // once it has begun there
  Task<Status> task_;
};

}  // namespace muster::collective
