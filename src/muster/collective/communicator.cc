#include "muster/collective/communicator.h"

#include <cxxabi.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>

#include "muster/base/callback_lane.h"
#include "muster/base/exception_status.h"
#include "muster/base/fork_guard.h"
#include "muster/base/log.h"
#include "muster/collective/call.h"
#include "muster/collective/collective_queue.h"
#include "muster/collective/driver.h"
#include "muster/collective/driving_thread.h"
#include "muster/collective/lookout.h"
#include "muster/collective/making.h"
#include "muster/collective/point_to_point.h"
#include "muster/collective/selection.h"
#include "muster/transport/core_sharing.h"

namespace muster::collective {
namespace {

/// How often a thread that waits looks after reminders, in the first second and later.
constexpr auto kEarlyLook = std::chrono::milliseconds(100);
constexpr auto kLateLook = std::chrono::seconds(1);
/// The latter where it has something of its own to look after too.
constexpr auto kOwnLook = std::chrono::milliseconds(500);

class GroupCommunicator final : public Communicator,
                                public Driver,
                                public std::enable_shared_from_this<GroupCommunicator> {
 public:
  GroupCommunicator(GroupContext group, std::shared_ptr<Shared> shared,
                    std::unique_ptr<RegionGroup> region, const Handout& handout)
      : group_(std::move(group)),
        shared_(std::move(shared)),
        segment_(handout.segment),
        messages_(group_),
        queue_(group_, std::move(region), handout.bounds) {
    shared_->progress.enter();
  }
  ~GroupCommunicator() override { shared_->progress.leave(); }

  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  std::span<const int> members() const override { return group_.channel->members(); }
  const std::string& name() const override { return group_.name; }
  transport::Channel& channel() override { return *group_.channel; }
  std::uint64_t sequence() const override { return queue_.sequence(); }
  Status failure() const override { return group_.channel->failure(); }

  Status run(const Args& args, TimePoint deadline) override;
  Status run(const Args& args, bool valid, Meanwhile& meanwhile) override;
  PendingRef start(Args args, TimePoint deadline, std::shared_ptr<void> owner) override;
  std::shared_ptr<void> drive_here() override;
  std::shared_ptr<void> look_while_waiting(std::function<void()> look) override;
  void refuse(Op op) override;
  PendingRef send(int member, std::uint64_t tag, ConstBytes data, DType dtype, TimePoint deadline,
                  std::shared_ptr<void> owner) override;
  PendingRef receive(int member, std::uint64_t tag, MutableBytes data, DType dtype,
                     TimePoint deadline, std::shared_ptr<void> owner) override;
  void abort(const std::string& reason) override;
  Status close(TimePoint deadline) override;

  std::shared_ptr<transport::Fabric> fabric() override { return group_.fabric; }
  void advance() override { advance_as(0); }
  void check_deadlines(TimePoint now) override {
    guarded([&] {
      queue_.check_deadlines(now);
      messages_.check_deadlines(now);
    });
  }
  bool busy() override { return !queue_.empty() || !messages_.empty(); }
  bool attended() override {
    return attending_.load() > 0 ||
           (driving_.load() > 0 && !queue_.has_calls_beside() && driver_.is_at_work(group_.now()));
  }
  bool attended_between() override { return attending_.load() == 0 && driving_.load() > 0; }
  void look_in() override {
    if (driving_.load() > 0) driver_.is_here(group_.now());
    advance();
  }
  TimePoint next_deadline() override {
    return std::min(queue_.next_deadline(), messages_.next_deadline());
  }
  bool attend(const std::function<bool()>& done, TimePoint limit) override;
  void let_others_go_on() override {
    if (attended()) {
      group_.fabric->wake();
    } else if (busy() && group_.fabric->threads()) {
      shared_->progress.notify();
    }
  }

 private:
  class Presence;

  void advance_as(int self) {
    guarded([&] {
      queue_.advance(attending_, self);
      messages_.sweep();
    });
  }
  /// What `work` throws ends the group: it stands for all of its calls.
  template <class Work>
  void guarded(Work work) {
    try {
      work();
    } catch (const abi::__forced_unwind&) {  // the thread is being ended
      throw;
    } catch (...) {
      static_cast<void>(queue_.fail_by_exception());
    }
  }
  Status prepare() { return group_.fabric->threads() ? shared_->progress.prepare() : Status(); }
  void watch(bool soon) {
    if (group_.fabric->threads()) shared_->progress.watch(shared_from_this(), soon);
  }
  /// Of a call, an `op`, that could not be made: the others would wait for it.
  PendingRef not_made(Op op, const Status& why);
  template <class Start>
  PendingRef message(Op op, Start start);
  // What this thread has finished must not look like work that it leaves to others.
  bool leave(bool reached) {
    guarded([&] { messages_.sweep(); });
    return reached;
  }
  Status in_a_child(std::string_view what) const;
  Status check_open(Op op) const;
  Status check(const Args& args) const;
  Status pass(const Args& args, Meanwhile& meanwhile);
  Status send_off(const Args& args, Meanwhile& meanwhile);
  Status take(const Args& args, Meanwhile& meanwhile);
  Status see_through(const Args& args, const transport::TransferRef& transfer, TimePoint deadline);
  Status check_message(std::string_view what, int member, std::uint64_t tag, std::size_t bytes,
                       DType dtype, bool any) const;
  Status drain(TimePoint deadline);
  Status part(TimePoint deadline);
  Status part_as_first(TimePoint deadline);
  Status late_at_close(const std::vector<int>& missing, const char* what);
  /// Runs `work(control)` under the drive lock, now.
  template <class Work>
  void with_control(Work work) {
    attend([&] { return queue_.with_control(work); }, TimePoint::max());
  }

  const ProcessMark mark_;
  const GroupContext group_;
  const std::shared_ptr<Shared> shared_;
  std::uint64_t segment_;
  std::atomic<int> attending_{0};
  std::atomic<int> driving_{0};  // see drive_here()
  DrivingThread driver_;         // of those that do
  Lookout lookout_;
  std::atomic<bool> closed_{false};
  PointToPoint messages_;
  CollectiveQueue queue_;
};

/// A thread that drives the communicator by waiting for it.
class GroupCommunicator::Presence {
 public:
  explicit Presence(GroupCommunicator& owner) : owner_(owner) { owner_.attending_.fetch_add(1); }
  ~Presence() {
    owner_.attending_.fetch_sub(1);
    owner_.let_others_go_on();
  }

 private:
  GroupCommunicator& owner_;
  const CallbackLane::Busy busy_;  // where it is a callback that waits
};

bool GroupCommunicator::attend(const std::function<bool()>& done, TimePoint limit) {
  struct Pass {
    GroupCommunicator& owner;
    const std::function<bool()>& done;
    std::uint64_t additions;
    bool operator()() const {
      owner.advance_as(1);
      return done() || owner.queue_.additions() != additions;
    }
  };
  const Presence presence(*this);
  advance_as(1);
  if (done()) return leave(true);
  const TimePoint began = group_.now();
  Duration late = kLateLook;
  for (TimePoint now = began;;) {
    const Pass pass{*this, done, queue_.additions()};
    const TimePoint look = now + (now - began < kLateLook ? Duration(kEarlyLook) : late);
    group_.fabric->wait([&pass] { return pass(); }, std::min({limit, next_deadline(), look}));
    if (done()) return leave(true);
    now = group_.now();
    check_deadlines(now);
    queue_.remind(now);
    late = lookout_.look() ? Duration(kOwnLook) : Duration(kLateLook);
    if (now >= limit) return leave(done());
  }
}

Status GroupCommunicator::in_a_child(std::string_view what) const {
  return Status(Code::aborted, std::string(what) + " was called on " + group_.here() +
                                   " by a forked child; connections and shared memory are its "
                                   "parent's: call it there, or start a job of "
                                   "the child's own");
}

Status GroupCommunicator::check_open(Op op) const {
  if (mark_.forked()) return in_a_child(info(op).name);
  if (!closed_.load()) return {};
  return Status(Code::aborted, std::string(info(op).name) + " was called on " + group_.here() +
                                   ", which has been closed; make a new group");
}

Status GroupCommunicator::check(const Args& args) const {
  if (Status open = check_open(args.op); !open) return open;
  Status valid = validate(args, rank(), size());
  return valid.ok() ? valid : valid.with_context(group_.here());
}

Status GroupCommunicator::run(const Args& args, TimePoint deadline) {
  struct Until final : Meanwhile {
    explicit Until(TimePoint given) : deadline(given) {}
    TimePoint begun() noexcept override { return deadline; }
    const TimePoint deadline;
  } until(deadline);
  return run(args, false, until);
}

Status GroupCommunicator::run(const Args& args, bool valid, Meanwhile& meanwhile) {
  if (is_message(args.op)) return pass(args, meanwhile);
  if (!valid || mark_.forked() || closed_.load()) {
    if (Status fine = valid ? check_open(args.op) : check(args); !fine) return fine;
  }
  return queue_.run(*this, args, meanwhile);
}

PendingRef GroupCommunicator::not_made(Op op, const Status& why) {
  const Status cause(why.code(),
                     "rank " + std::to_string(group_.job_rank()) + " could not make its call of " +
                         std::string(info(op).name) + " in " + group_.text() + ": " + why.message(),
                     {group_.job_rank()});
  group_.channel->fail(cause);
  group_.fabric->wake();
  return std::make_shared<Finished>(group_.channel->failure());
}

PendingRef GroupCommunicator::start(Args args, TimePoint deadline, std::shared_ptr<void> owner) {
  if (Status valid = check(args); !valid) return std::make_shared<Finished>(std::move(valid));
  const Op op = args.op;
  if (Status ready = prepare(); !ready) return not_made(op, ready);
  std::shared_ptr<CollectiveQueue::Operation> operation;
  try {
    const bool beside = driving_.load() > 0 && !driver_.is_this_thread();
    operation =
        queue_.start(shared_from_this(), std::move(args), deadline, std::move(owner), beside);
  } catch (...) {
    return not_made(op, status_of_exception());
  }
  const bool driven = attended();  // whoever leaves after this sees the call
  if (driven) {
    group_.fabric->wake();  // its limit does not know of this deadline
  } else if (group_.fabric->threads()) {
    advance();  // where all others have come already, nobody need be woken
    if (operation->published() && !busy()) return operation;
  }
  watch(!driven);
  if (driven && !attended()) shared_->progress.notify();  // it has left before the call was watched
  return operation;
}

std::shared_ptr<void> GroupCommunicator::drive_here() {
  struct Driving {
    explicit Driving(std::shared_ptr<GroupCommunicator> driven) : group(std::move(driven)) {
      group->driver_.is_here(group->group_.now());
      group->driving_.fetch_add(1);
    }
    ~Driving() {
      group->driving_.fetch_sub(1);
      group->let_others_go_on();
    }
    std::shared_ptr<GroupCommunicator> group;
  };
  return std::make_shared<Driving>(shared_from_this());
}

std::shared_ptr<void> GroupCommunicator::look_while_waiting(std::function<void()> look) {
  struct Looking {
    Looking(std::shared_ptr<GroupCommunicator> in, std::function<void()> what)
        : group(std::move(in)), look(std::move(what)) {
      group->lookout_.add(look);
    }
    ~Looking() { group->lookout_.remove(look); }
    const std::shared_ptr<GroupCommunicator> group;
    const std::function<void()> look;
  };
  return std::make_shared<Looking>(shared_from_this(), std::move(look));
}

void GroupCommunicator::refuse(Op op) {
  if (mark_.forked() || closed_.load() || size() == 1) return;
  if (Status ready = prepare(); !ready) return static_cast<void>(not_made(op, ready));
  try {
    queue_.refuse(shared_from_this(), op);
  } catch (...) {
    return static_cast<void>(not_made(op, status_of_exception()));
  }
  watch(true);
  advance();
}

Status GroupCommunicator::check_message(std::string_view what, int member, std::uint64_t tag,
                                        std::size_t bytes, DType dtype, bool any) const {
  const auto invalid = [&](const std::string& why) {
    return Status(Code::invalid_argument, std::string(what) + " in " + group_.here() + " " + why);
  };
  if (mark_.forked()) return in_a_child(what);
  if (closed_.load())
    return Status(Code::aborted, std::string(what) + " was called on " + group_.here() +
                                     ", which has been closed; make a new group");
  if ((member < 0 || member >= size()) && !(any && member == transport::kAnyMember)) {
    return invalid("needs a peer from 0 to " + std::to_string(size() - 1) +
                   ", a position in the group, and got " + std::to_string(member));
  }
  if (tag >= kFirstReservedTag)
    return invalid("needs a tag below 2^62 and got " + std::to_string(tag));
  if (bytes % size_of(dtype) != 0) {
    return invalid("got " + std::to_string(bytes) + " bytes, which is no whole number of " +
                   std::string(name_of(dtype)) + " elements");
  }
  return {};
}

/// Of messages a failure ends the group too: what may still write into the caller's memory ends
/// with it.
template <class Start>
PendingRef GroupCommunicator::message(Op op, Start start) {
  if (Status ready = prepare(); !ready) return not_made(op, ready);
  try {
    const std::shared_ptr<PointToPoint::Message> made = start();
    if (!made->published()) watch(false);
    return made;
  } catch (...) {
    return not_made(op, status_of_exception());
  }
}

PendingRef GroupCommunicator::send(int member, std::uint64_t tag, ConstBytes data, DType dtype,
                                   TimePoint deadline, std::shared_ptr<void> owner) {
  if (Status valid = check_message("send", member, tag, data.size(), dtype, false); !valid)
    return std::make_shared<Finished>(std::move(valid));
  return message(Op::send, [&] {
    return messages_.send(shared_from_this(), member, tag, data, dtype, deadline, std::move(owner));
  });
}

PendingRef GroupCommunicator::receive(int member, std::uint64_t tag, MutableBytes data, DType dtype,
                                      TimePoint deadline, std::shared_ptr<void> owner) {
  if (Status valid = check_message("recv", member, tag, data.size(), dtype, true); !valid)
    return std::make_shared<Finished>(std::move(valid));
  return message(Op::recv, [&] {
    return messages_.receive(shared_from_this(), member, tag, data, dtype, deadline,
                             std::move(owner));
  });
}

/// One message, from start to end. What has gone at once, or comes in the time of a round trip,
/// needs nobody to look after it.
Status GroupCommunicator::pass(const Args& args, Meanwhile& meanwhile) {
  const bool receives = args.op == Op::recv;
  const std::string_view name = info(args.op).name;
  if (args.inputs.size() != (receives ? 0 : 1) || args.outputs.size() != (receives ? 1 : 0)) {
    return Status(Code::invalid_argument, std::string(name) + " in " + group_.here() +
                                              " needs one slice, an " +
                                              (receives ? "output" : "input") + ", and got " +
                                              std::to_string(args.inputs.size()) + " inputs and " +
                                              std::to_string(args.outputs.size()) + " outputs");
  }
  if (Status valid =
          check_message(name, args.root, args.tag, message_bytes(args), args.dtype, false);
      !valid)
    return valid;
  try {
    return receives ? take(args, meanwhile) : send_off(args, meanwhile);
  } catch (const abi::__forced_unwind&) {  // the thread is being ended
    throw;
  } catch (...) {
    return queue_.fail_by_exception();
  }
}

/// On its way before anything else is done.
Status GroupCommunicator::send_off(const Args& args, Meanwhile& meanwhile) {
  const transport::TransferRef transfer = messages_.send_off(args);
  const TimePoint deadline = meanwhile.begun();
  meanwhile.at_once = transfer == nullptr;
  return meanwhile.at_once ? Status() : see_through(args, transfer, deadline);
}

Status GroupCommunicator::take(const Args& args, Meanwhile& meanwhile) {
  using transport::Taken;
  const TimePoint deadline = meanwhile.begun();
  const bool alone = !busy();
  const int rank = group_.job_rank_of(args.root);
  Taken taken = alone ? messages_.take_at_once(args) : Taken::otherwise;
  meanwhile.at_once = taken == Taken::yes;
  const bool came = taken == Taken::not_yet && group_.fabric->await_briefly(rank);
  if (came) taken = messages_.take_at_once(args);
  if (taken == Taken::yes) return {};
  const transport::TransferRef transfer = messages_.post(args);
  if (came && !transfer->done()) group_.fabric->take_in(rank);
  if (alone && !transfer->done())
    group_.fabric->wait([&transfer] { return transfer->done(); },
                        std::min(deadline, group_.now() + transport::kRoundTrip));
  return see_through(args, transfer, deadline);
}

/// Waits for a message that is under way, or over. Whatever is thrown meanwhile, it is over in the
/// end: its memory is the caller's.
Status GroupCommunicator::see_through(const Args& args, const transport::TransferRef& transfer,
                                      TimePoint deadline) {
  if (transfer->done() && transfer->status().ok()) return {};
  try {
    const auto message = messages_.follow(shared_from_this(), args, transfer, deadline);
    if (!message->published()) watch(false);
    return message->wait(TimePoint::max());
  } catch (const abi::__forced_unwind&) {  // the thread is being ended
    throw;
  } catch (...) {
    const Status why = queue_.fail_by_exception();
    group_.fabric->wait([&transfer] { return transfer->done(); }, TimePoint::max());
    return why;
  }
}

void GroupCommunicator::abort(const std::string& reason) {
  if (mark_.forked()) return;
  group_.channel->fail(Status(
      Code::aborted,
      "rank " + std::to_string(group_.job_rank()) + " aborted " + group_.text() + ": " + reason,
      {group_.job_rank()}));
  group_.fabric->wake();
  if (busy() && prepare().ok()) watch(true);
}

Status GroupCommunicator::late_at_close(const std::vector<int>& missing, const char* what) {
  group_.channel->fail(
      Status(Code::timed_out,
             "rank " + std::to_string(group_.job_rank()) + " closes " + group_.text() +
                 " and waited for " + describe_ranks(missing) + " " + what +
                 (group_.witness ? group_.witness->tell(group_.name, missing) : "") +
                 "; see whether they still are in a call",
             missing));
  return group_.channel->failure();
}

Status GroupCommunicator::drain(TimePoint deadline) {
  const bool quiet = attend([this] { return queue_.empty() && messages_.sends_over(); }, deadline);
  if (!quiet) {
    group_.channel->fail(Status(Code::timed_out,
                                "rank " + std::to_string(group_.job_rank()) + " closes " +
                                    group_.text() +
                                    " while calls or messages are under way that did not end in "
                                    "time; wait for them before closing",
                                {group_.job_rank()}));
    attend([this] { return queue_.empty() && messages_.sends_over(); }, TimePoint::max());
  }
  return group_.channel->failure();
}

Status GroupCommunicator::part_as_first(TimePoint deadline) {
  std::vector<int> missing;
  const auto all_leave = [&] {
    queue_.with_control([&](Control& control) { missing = control.not_leaving(); });
    // A rank whose process has ended tells nothing any more. It made all calls that needed it.
    if (group_.channel->someone_left())
      std::erase_if(missing, [this](int rank) { return !group_.fabric->gone(rank).ok(); });
    return missing.empty() || group_.channel->failed();
  };
  missing = {-1};
  if (!attend(all_leave, deadline)) return late_at_close(missing, "to close it too");
  if (group_.channel->failed()) return group_.channel->failure();
  Status same;
  with_control([&](Control& control) {
    same = control.compare_leaving();
    if (same.ok()) control.tell_released();
  });
  if (!same.ok()) {
    group_.channel->fail(same);
    return group_.channel->failure();
  }
  bool sent = false;
  attend(
      [&] {
        queue_.with_control([&](Control& control) { sent = control.all_sent(); });
        return sent || group_.channel->failed();
      },
      deadline);
  return group_.channel->failure();
}

Status GroupCommunicator::part(TimePoint deadline) {
  with_control([](Control& control) { control.tell_leaving(); });
  if (rank() == 0) return part_as_first(deadline);
  bool released = false;
  const auto let_go = [&] {
    queue_.with_control([&](Control& control) { released = control.released(); });
    return released || group_.channel->failed() ||
           (group_.channel->someone_left() && !group_.fabric->gone(group_.job_rank_of(0)).ok());
  };
  // The first member knows who is missing: it gets the chance to say so.
  const TimePoint limit =
      deadline < TimePoint::max() - kVerdictGrace ? deadline + kVerdictGrace : deadline;
  if (!attend(let_go, limit))
    return late_at_close({group_.job_rank_of(0)}, "to hear from all and let the others go");
  return group_.channel->failure();
}

Status GroupCommunicator::close(TimePoint deadline) {
  if (mark_.forked() || closed_.exchange(true)) return {};
  Status status = drain(deadline);
  if (status.ok() && size() > 1) status = part(deadline);
  messages_.cancel_receives("its group has been closed");
  attend([this] { return !busy(); }, TimePoint::max());
  shared_->progress.forget(*this);
  queue_.drop_region();
  // After a failure another member may still look at the region: then its segment stays taken.
  if (status.ok() && rank() == 0 && segment_ != kNoSegment)
    group_.fabric->region()->release(segment_);
  segment_ = kNoSegment;
  return status.ok() ? status : status.with_context("closing " + group_.here());
}

}  // namespace

std::shared_ptr<Communicator> assemble(std::shared_ptr<transport::Fabric> fabric, Agreement agreed,
                                       std::string name,
                                       std::shared_ptr<const trace::Witness> witness) {
  std::unique_ptr<RegionGroup> region_group;
  const Handout& handout = agreed.handout;
  if (handout.segment != kNoSegment) {
    const Selection selection(Ground::region, agreed.channel->size(), handout.bounds);
    region_group =
        RegionGroup::attach(*fabric->region(), handout.segment, *agreed.channel, selection);
  }
  if (logs(LogLevel::debug) && agreed.channel->size() > 1) {
    const bool in_region = region_group != nullptr;
    const Selection used(in_region ? Ground::region : Ground::links, agreed.channel->size(),
                         handout.bounds, standing_of(*fabric, agreed.channel->members()));
    log(LogLevel::debug, "group " + name + ", algorithms over " +
                             (in_region ? "shared memory" : "links") + ":" + text_of(used));
  }
  auto shared = shared_of(*fabric);
  GroupContext context{std::move(fabric), std::move(agreed.channel), std::move(name),
                       std::move(witness)};
  return std::make_shared<GroupCommunicator>(std::move(context), std::move(shared),
                                             std::move(region_group), handout);
}

std::shared_ptr<transport::Fabric> fabric_of(Communicator& group) {
  return static_cast<GroupCommunicator&>(group).fabric();
}

}  // namespace muster::collective
