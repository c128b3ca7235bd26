// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/communicator.h"

#include <cxxabi.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <optional>
#include <set>

#include "core/base/exception_status.h"
#include "core/base/log/log.h"
#include "core/collective/call.h"
#include "core/collective/creation/group_creation.h"
#include "core/collective/point_to_point.h"
#include "core/collective/queue/collective_queue.h"
#include "core/collective/queue/driver.h"
#include "core/collective/queue/queued_communicator.h"
#include "core/collective/select/selection.h"
#include "core/tunables/tunables.h"
#include "core/wait/callbacks.h"

namespace muster::collective {
namespace {

/// How often a waiting thread checks for reminders, in the first second and later.
constexpr auto kEarlyCheckInterval = std::chrono::milliseconds(100);  // limit: delay of a diagnosis
constexpr auto kLateCheckInterval = std::chrono::seconds(1);
/// The latter for a thread with idle callbacks.
constexpr auto kIdleCallbackInterval =
    std::chrono::milliseconds(500);  // limit: delay of a callback

constexpr const char* kInChild =
    "; connections and shared memory are its parent's: call it there, or start a job of the "
    "child's own";

/// For a group without a region.
bool can_take_pieces(const GroupContext& group) {
  if (group.size() < 2 || group.size() > static_cast<int>(fixed::kInFlight) + 1) return false;
  const auto host_of = group.fabric->hosts();
  std::set<int> hosts;
  for (const int rank : group.channel->members())
    hosts.insert(host_of[static_cast<std::size_t>(rank)]);
  return hosts.size() == 1 || std::ssize(hosts) == group.size();
}

class GroupCommunicator final : public QueuedCommunicator,
                                public std::enable_shared_from_this<GroupCommunicator> {
 public:
  GroupCommunicator(GroupContext group, std::shared_ptr<FabricState> shared,
                    std::unique_ptr<RegionGroup> region, const GroupDescriptor& descriptor)
      : QueuedCommunicator(std::move(group)),
        fabric_state_(std::move(shared)),
        messages_(group_),
        takes_pieces_(region == nullptr && can_take_pieces(group_)),
        queue_(group_, std::move(region), descriptor) {
    fabric_state_->progress.enter();
  }
  ~GroupCommunicator() override { fabric_state_->progress.leave(); }

  bool shares_memory() const override {
    return share_a_region(*group_.fabric, group_.channel->members());
  }
  bool prepares_calls() const override { return true; }
  bool takes_pieces() const override { return takes_pieces_; }
  std::uint64_t sequence() const override { return queue_.number(); }

  Status run(const Args& args, CallRecord& record) override;
  PendingRef start(Args args, CallRecord& record, std::shared_ptr<void> owner) override;
  std::shared_ptr<void> manual_progress() override;
  std::shared_ptr<void> on_idle(std::function<void()> callback) override;
  std::uint64_t refuse(Op op) override;
  void abort(const std::string& reason) override;
  Status close(TimePoint deadline) override;

  void advance() override { advance_as(0); }
  void check_deadlines(TimePoint now) override {
    guarded([&] {
      queue_.check_deadlines(now);
      messages_.check_deadlines(now);
    });
  }
  bool busy() override { return !queue_.empty() || !messages_.empty(); }
  bool has_driver() override {
    return waiting_threads_.load() > 0 ||
           (driving_.load() > 0 && !queue_.has_calls_unknown_to_driver() &&
            driver_.is_running(group_.now()));
  }
  bool is_polled_between_compute() override {
    return waiting_threads_.load() == 0 && driving_.load() > 0;
  }
  void poll_between_compute() override {
    if (driving_.load() > 0) driver_.note_driving(group_.now());
    advance();
  }
  TimePoint next_deadline() override {
    return std::min(queue_.next_deadline(), messages_.next_deadline());
  }
  bool drive_until(const std::function<bool()>& done, TimePoint limit) override;
  bool is_drained() override { return queue_.empty() && messages_.sends_done(); }
  bool with_control(const std::function<void(Control&)>& work) override {
    return queue_.with_control(work);
  }
  void cancel_receives(const std::string& why) override { messages_.cancel_receives(why); }
  void notify_progress_thread() override {
    if (has_driver()) {
      group_.fabric->wake();
    } else if (busy() && group_.fabric->threads()) {
      fabric_state_->progress.notify();
    }
  }

 private:
  class DriverScope;

  void advance_as(int self) {
    guarded([&] {
      queue_.advance(waiting_threads_, self);
      messages_.sweep();
    });
  }
  Status prepare() {
    return group_.fabric->threads() ? fabric_state_->progress.prepare() : Status();
  }
  void watch(bool soon) {
    if (group_.fabric->threads()) fabric_state_->progress.watch(shared_from_this(), soon);
  }
  PendingRef start_collective(Args args, CallRecord& record, std::shared_ptr<void> owner);
  Status run_message(const Args& args, CallRecord& record);
  // Publishes messages that this thread has completed, so that other threads do not see them as
  // outstanding work.
  bool finish_driving(bool reached) {
    guarded([&] { messages_.sweep(); });
    return reached;
  }

  const std::shared_ptr<FabricState> fabric_state_;
  std::atomic<int> waiting_threads_{0};
  std::atomic<int> driving_{0};  // number of manual_progress() objects
  DrivingThread driver_;         // the thread that holds the latest one
  IdleCallbacks idle_callbacks_;
  PointToPoint messages_;
  const bool takes_pieces_;
  CollectiveQueue queue_;
};

/// A thread that drives the communicator while it waits.
class GroupCommunicator::DriverScope {
 public:
  explicit DriverScope(GroupCommunicator& owner) : owner_(owner) {
    owner_.waiting_threads_.fetch_add(1);
  }
  ~DriverScope() {
    owner_.waiting_threads_.fetch_sub(1);
    owner_.notify_progress_thread();
  }

 private:
  GroupCommunicator& owner_;
  const CallbackLane::Busy busy_;  // if the waiting thread runs a callback
};

bool GroupCommunicator::drive_until(const std::function<bool()>& done, TimePoint limit) {
  struct DrivePass {
    GroupCommunicator& owner;
    const std::function<bool()>& done;
    std::uint64_t additions;
    bool operator()() const {
      owner.advance_as(1);
      return done() || owner.queue_.additions() != additions;
    }
  };
  const DriverScope scope(*this);
  advance_as(1);
  if (done()) return finish_driving(true);
  const TimePoint began = group_.now();
  Duration check_interval = kLateCheckInterval;
  for (TimePoint now = began;;) {
    const DrivePass pass{*this, done, queue_.additions()};
    const TimePoint next_check =
        now + (now - began < kLateCheckInterval ? Duration(kEarlyCheckInterval) : check_interval);
    group_.fabric->wait([&pass] { return pass(); }, std::min({limit, next_deadline(), next_check}));
    if (done()) return finish_driving(true);
    now = group_.now();
    check_deadlines(now);
    queue_.remind(now);
    check_interval =
        idle_callbacks_.run() ? Duration(kIdleCallbackInterval) : Duration(kLateCheckInterval);
    if (now >= limit) return finish_driving(done());
  }
}

Status GroupCommunicator::run(const Args& args, CallRecord& record) {
  if (!args.checked || is_over()) {
    if (Status fine = check(args, kInChild); !fine) return fine;
  }
  if (is_message(args.op)) return run_message(args, record);
  InlineCall call(queue_, args, record);
  bool completed = false;
  if (call.holds_lock()) {
    try {
      RegionGroup* const region = queue_.region();  // null over links; `close` drops it
      completed = call.check_notes() &&
                  ((region != nullptr && region->inline_calls().try_inline(args, call)) ||
                   call.run_bounded(*this));
    } catch (...) {  // fails the call, which then ends like any other failed call
      static_cast<void>(group_.fail_by_exception(&call.fingerprint));
    }
  }
  if (!completed) return queue_.run(*this, args, record, call);
  call.release_lock();
  if (!queue_.empty() || has_driver()) notify_progress_thread();
  return {};
}

/// Returns only after the message has ended, even if an exception is thrown once it is posted,
/// because its memory belongs to the caller. A failure fails the group, which also ends other
/// accesses to that memory.
Status GroupCommunicator::run_message(const Args& args, CallRecord& record) {
  if (args.root == transport::kAnyMember) return start(args, record, {})->wait(TimePoint::max());
  transport::TransferRef transfer;
  try {
    transfer = messages_.run_inline(args, record, !busy());
    if (transfer == nullptr) return {};
    const auto message = messages_.follow(shared_from_this(), args, transfer, record.deadline);
    if (!message->published()) watch(false);
    return message->wait(TimePoint::max());
  } catch (const abi::__forced_unwind&) {  // the thread is being terminated
    throw;
  } catch (...) {
    Status why = group_.fail_by_exception();
    if (transfer != nullptr)
      group_.fabric->wait([&transfer] { return transfer->done(); }, TimePoint::max());
    return why;
  }
}

PendingRef GroupCommunicator::start(Args args, CallRecord& record, std::shared_ptr<void> owner) {
  if (Status valid = check(args, kInChild); !valid)
    return std::make_shared<Finished>(std::move(valid));
  const Op op = args.op;
  if (Status ready = prepare(); !ready) return fail_start(op, ready);
  try {
    if (!is_message(op)) return start_collective(std::move(args), record, std::move(owner));
    const auto message = messages_.start(shared_from_this(), args, record, std::move(owner));
    if (!message->published()) watch(false);
    return message;
  } catch (...) {  // messages too: failing the group ends accesses to the caller's memory
    return fail_start(op, status_of_exception());
  }
}

PendingRef GroupCommunicator::start_collective(Args args, CallRecord& record,
                                               std::shared_ptr<void> owner) {
  const bool unknown_to_driver = driving_.load() > 0 && !driver_.is_this_thread();
  const auto operation = queue_.start(shared_from_this(), std::move(args), record, std::move(owner),
                                      unknown_to_driver);
  const bool has_other_driver = has_driver();  // a driver that leaves later sees the call
  if (has_other_driver) {
    group_.fabric->wake();  // its wait does not know this deadline
  } else if (group_.fabric->threads()) {
    advance();  // if all peers are ready, no thread need be woken
    if (operation->published() && !busy()) return operation;
  }
  watch(!has_other_driver);
  // A driver that leaves first stops counting as one, then looks for calls; this thread first
  // queues the call, then looks for a driver. So one of them wakes the progress thread.
  if (has_other_driver && !has_driver())
    fabric_state_->progress.notify();  // it left before the call was watched
  return operation;
}

std::shared_ptr<void> GroupCommunicator::manual_progress() {
  struct Driving {
    explicit Driving(std::shared_ptr<GroupCommunicator> communicator)
        : group(std::move(communicator)) {
      group->driver_.note_driving(group->group_.now());
      group->driving_.fetch_add(1);
    }
    ~Driving() {
      group->driving_.fetch_sub(1);
      group->notify_progress_thread();
    }
    std::shared_ptr<GroupCommunicator> group;
  };
  return std::make_shared<Driving>(shared_from_this());
}

std::shared_ptr<void> GroupCommunicator::on_idle(std::function<void()> callback) {
  return idle_scope(shared_from_this(), idle_callbacks_, std::move(callback));
}

std::uint64_t GroupCommunicator::refuse(Op op) {
  if (is_over() || size() == 1) return 0;
  Status failed = prepare();
  std::uint64_t number = 0;
  if (failed.ok()) {
    try {
      number = queue_.refuse(shared_from_this(), op);
    } catch (...) {
      failed = status_of_exception();
    }
  }
  if (!failed.ok()) {
    fail_start(op, failed);
    return 0;
  }
  watch(true);
  advance();
  return number;
}

void GroupCommunicator::abort(const std::string& reason) {
  if (is_forked()) return;
  fail_by_abort(reason);
  if (busy() && prepare().ok()) watch(true);
}

Status GroupCommunicator::close(TimePoint deadline) {
  if (!begin_close()) return {};
  CommunicatorClose closing(group_, *this, *this);
  Status status = closing.run(deadline);
  // The progress thread lets go of this object, and the region is detached, only once no call uses
  // its memory.
  drive_until([this] { return !busy(); }, TimePoint::max());
  fabric_state_->progress.forget(*this);
  queue_.drop_region();
  return status.ok() ? status : status.with_context("closing " + group_.here());
}

}  // namespace

Status Communicator::run(const Args& args, TimePoint deadline) {
  CallRecord record(deadline);
  return run(args, record);
}

PendingRef Communicator::start(Args args, TimePoint deadline, std::shared_ptr<void> owner) {
  CallRecord record(deadline);
  return start(std::move(args), record, std::move(owner));
}

PendingRef Communicator::send(int member, std::uint64_t tag, ConstBytes data, DType dtype,
                              TimePoint deadline, std::shared_ptr<void> owner) {
  return start({.op = Op::send, .dtype = dtype, .root = member, .tag = tag, .inputs = {data}},
               deadline, std::move(owner));
}

PendingRef Communicator::receive(int member, std::uint64_t tag, MutableBytes data, DType dtype,
                                 TimePoint deadline, std::shared_ptr<void> owner) {
  return start({.op = Op::recv, .dtype = dtype, .root = member, .tag = tag, .outputs = {data}},
               deadline, std::move(owner));
}

std::shared_ptr<Communicator> assemble(std::shared_ptr<transport::Fabric> fabric, Agreement agreed,
                                       std::string name,
                                       std::shared_ptr<const trace::PeerTraces> peer_traces) {
  std::unique_ptr<RegionGroup> region_group;
  const GroupDescriptor& descriptor = agreed.descriptor;
  if (descriptor.segment != kNoSegment) {
    const Selection selection(Medium::shared_memory, agreed.channel->size(), descriptor.bounds);
    region_group =
        RegionGroup::attach(*fabric->region(), descriptor.segment, *agreed.channel, selection);
  }
  if (logs(LogLevel::debug) && agreed.channel->size() > 1) {
    const bool in_region = region_group != nullptr;
    const Selection used(in_region ? Medium::shared_memory : Medium::network,
                         agreed.channel->size(), descriptor.bounds,
                         placement_of(*fabric, agreed.channel->members()));
    log(LogLevel::debug, "group " + name + ", algorithms over " +
                             (in_region ? "shared memory" : "links") + ":" + text_of(used));
  }
  auto shared = fabric_state_of(*fabric);
  GroupContext context{std::move(fabric), std::move(agreed.channel), std::move(name),
                       std::move(peer_traces)};
  return std::make_shared<GroupCommunicator>(std::move(context), std::move(shared),
                                             std::move(region_group), descriptor);
}

std::shared_ptr<transport::Fabric> fabric_of(Communicator& group) {
  return static_cast<GroupCommunicator&>(group).fabric();
}

}  // namespace muster::collective
