#include "muster/collective/communicator.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>

#include "muster/base/fork_guard.h"
#include "muster/collective/agreement.h"
#include "muster/collective/call.h"
#include "muster/collective/collective_queue.h"
#include "muster/collective/driver.h"
#include "muster/collective/driving_thread.h"
#include "muster/collective/point_to_point.h"
#include "muster/collective/progress.h"
#include "muster/collective/tuning.h"

namespace muster::collective {
namespace {

constexpr std::uint64_t kNoSegment = ~std::uint64_t{0};
/// How often a thread that waits looks after reminders, in the first second and later.
constexpr auto kEarlyLook = std::chrono::milliseconds(100);
constexpr auto kLateLook = std::chrono::seconds(1);

/// What the communicators of one fabric share.
struct Shared final : transport::Fabric::Companion {
  Progress progress;
  std::mutex lock;
  std::map<std::pair<std::vector<int>, std::string>, std::uint64_t> uses;

  std::uint64_t next_use(std::vector<int> members, const std::string& name) {
    std::sort(members.begin(), members.end());
    const std::lock_guard guard(lock);
    return uses[{std::move(members), name}]++;
  }
};

class GroupCommunicator final : public Communicator, public Driver, public std::enable_shared_from_this<GroupCommunicator> {
 public:
  GroupCommunicator(GroupContext group, std::shared_ptr<Shared> shared, std::unique_ptr<RegionGroup> region, const Handout& handout)
      : group_(std::move(group)),
        shared_(std::move(shared)),
        segment_(handout.segment),
        messages_(group_),
        queue_(group_, std::move(region), handout.bounds) {}

  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  std::span<const int> members() const override { return group_.channel->members(); }
  const std::string& name() const override { return group_.name; }
  transport::Channel& channel() override { return *group_.channel; }
  std::uint64_t sequence() const override { return queue_.sequence(); }
  Status failure() const override { return group_.channel->failure(); }

  Status run(const Args& args, TimePoint deadline) override;
  Status run(const Args& args, bool valid, Meanwhile& meanwhile) override;
  PendingRef start(Args args, TimePoint deadline) override;
  std::shared_ptr<void> drive_here() override;
  void refuse(Op op) override;
  PendingRef send(int member, std::uint64_t tag, ConstBytes data, DType dtype, TimePoint deadline) override;
  PendingRef receive(int member, std::uint64_t tag, MutableBytes data, DType dtype, TimePoint deadline) override;
  void abort(const std::string& reason) override;
  Status close(TimePoint deadline) override;

  std::shared_ptr<transport::Fabric> fabric() override { return group_.fabric; }
  void advance() override { advance_as(0); }
  void check_deadlines(TimePoint now) override {
    queue_.check_deadlines(now);
    messages_.check_deadlines(now);
  }
  bool busy() override { return !queue_.empty() || !messages_.empty(); }
  bool attended() override { return attending_.load() > 0 || (driving_.load() > 0 && driver_.is_at_work(group_.now())); }
  bool attended_between() override { return attending_.load() == 0 && driving_.load() > 0; }
  void look_in() override {
    if (driving_.load() > 0) driver_.is_here(group_.now());
    advance();
  }
  TimePoint next_deadline() override { return std::min(queue_.next_deadline(), messages_.next_deadline()); }
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
    queue_.advance(attending_, self);
    messages_.sweep();
  }
  void watch(bool soon) {
    if (group_.fabric->threads()) shared_->progress.watch(shared_from_this(), soon);
  }
  // What this thread has finished must not look like work that it leaves to others.
  bool leave(bool reached) {
    messages_.sweep();
    return reached;
  }
  Status in_a_child(std::string_view what) const;
  Status check_open(Op op) const;
  Status check(const Args& args) const;
  Status check_message(const char* what, int member, std::uint64_t tag, std::size_t bytes, DType dtype, bool any) const;
  PendingRef track(std::shared_ptr<PointToPoint::Message> message) {
    if (!message->published()) watch(false);
    return message;
  }
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
  for (TimePoint now = began;;) {
    const Pass pass{*this, done, queue_.additions()};
    const TimePoint look = now + (now - began < kLateLook ? TimePoint::duration(kEarlyLook) : TimePoint::duration(kLateLook));
    group_.fabric->wait([&pass] { return pass(); }, std::min({limit, next_deadline(), look}));
    if (done()) return leave(true);
    now = group_.now();
    check_deadlines(now);
    queue_.remind(now);
    if (now >= limit) return leave(done());
  }
}

Status GroupCommunicator::in_a_child(std::string_view what) const {
  return Status(Code::aborted, std::string(what) + " was called on " + group_.here() +
                                   " by a forked child; connections and shared memory are its parent's: call it there, or start a job of "
                                   "the child's own");
}

Status GroupCommunicator::check_open(Op op) const {
  if (mark_.forked()) return in_a_child(info(op).name);
  if (!closed_.load()) return {};
  return Status(Code::aborted,
                std::string(info(op).name) + " was called on " + group_.here() + ", which has been closed; make a new group");
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
  if (!valid || mark_.forked() || closed_.load()) {
    if (Status fine = valid ? check_open(args.op) : check(args); !fine) return fine;
  }
  return queue_.run(*this, args, meanwhile);
}

PendingRef GroupCommunicator::start(Args args, TimePoint deadline) {
  if (Status valid = check(args); !valid) return std::make_shared<Finished>(std::move(valid));
  auto operation = queue_.start(shared_from_this(), std::move(args), deadline);
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

void GroupCommunicator::refuse(Op op) {
  if (mark_.forked() || closed_.load() || size() == 1) return;
  queue_.refuse(shared_from_this(), op);
  watch(true);
  advance();
}

Status GroupCommunicator::check_message(const char* what, int member, std::uint64_t tag, std::size_t bytes, DType dtype, bool any) const {
  const auto invalid = [&](const std::string& why) {
    return Status(Code::invalid_argument, std::string(what) + " in " + group_.here() + " " + why);
  };
  if (mark_.forked()) return in_a_child(what);
  if (closed_.load())
    return Status(Code::aborted, std::string(what) + " was called on " + group_.here() + ", which has been closed; make a new group");
  if ((member < 0 || member >= size()) && !(any && member == transport::kAnyMember)) {
    return invalid("needs a peer from 0 to " + std::to_string(size() - 1) + ", a position in the group, and got " + std::to_string(member));
  }
  if (tag >= kFirstReservedTag) return invalid("needs a tag below 2^62 and got " + std::to_string(tag));
  if (bytes % size_of(dtype) != 0) {
    return invalid("got " + std::to_string(bytes) + " bytes, which is no whole number of " + std::string(name_of(dtype)) + " elements");
  }
  return {};
}

PendingRef GroupCommunicator::send(int member, std::uint64_t tag, ConstBytes data, DType dtype, TimePoint deadline) {
  if (Status valid = check_message("send", member, tag, data.size(), dtype, false); !valid)
    return std::make_shared<Finished>(std::move(valid));
  return track(messages_.send(shared_from_this(), member, tag, data, dtype, deadline));
}

PendingRef GroupCommunicator::receive(int member, std::uint64_t tag, MutableBytes data, DType dtype, TimePoint deadline) {
  if (Status valid = check_message("recv", member, tag, data.size(), dtype, true); !valid)
    return std::make_shared<Finished>(std::move(valid));
  return track(messages_.receive(shared_from_this(), member, tag, data, dtype, deadline));
}

void GroupCommunicator::abort(const std::string& reason) {
  if (mark_.forked()) return;
  group_.channel->fail(Status(Code::aborted, "rank " + std::to_string(group_.job_rank()) + " aborted " + group_.text() + ": " + reason,
                              {group_.job_rank()}));
  group_.fabric->wake();
  if (busy()) watch(true);
}

Status GroupCommunicator::late_at_close(const std::vector<int>& missing, const char* what) {
  group_.channel->fail(
      Status(Code::timed_out,
             "rank " + std::to_string(group_.job_rank()) + " closes " + group_.text() + " and waited for " + describe_ranks(missing) + " " +
                 what + (group_.witness ? group_.witness->tell(group_.name, missing) : "") + "; see whether they still are in a call",
             missing));
  return group_.channel->failure();
}

Status GroupCommunicator::drain(TimePoint deadline) {
  const bool quiet = attend([this] { return queue_.empty() && messages_.sends_over(); }, deadline);
  if (!quiet) {
    group_.channel->fail(Status(Code::timed_out,
                                "rank " + std::to_string(group_.job_rank()) + " closes " + group_.text() +
                                    " while calls or messages are under way that did not end in time; wait for them before closing",
                                {group_.job_rank()}));
    attend([this] { return queue_.empty() && messages_.sends_over(); }, TimePoint::max());
  }
  return group_.channel->failure();
}

Status GroupCommunicator::part_as_first(TimePoint deadline) {
  std::vector<int> missing;
  const auto all_leave = [&] {
    queue_.with_control([&](Control& control) { missing = control.not_leaving(); });
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
    return released || group_.channel->failed();
  };
  // The first member knows who is missing: it gets the chance to say so.
  const TimePoint limit = deadline < TimePoint::max() - kVerdictGrace ? deadline + kVerdictGrace : deadline;
  if (!attend(let_go, limit)) return late_at_close({group_.job_rank_of(0)}, "to hear from all and let the others go");
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
  if (status.ok() && rank() == 0 && segment_ != kNoSegment) group_.fabric->region()->release(segment_);
  segment_ = kNoSegment;
  return status.ok() ? status : status.with_context("closing " + group_.here());
}

Status check_members(const transport::Fabric& fabric, const std::vector<int>& members) {
  if (std::find(members.begin(), members.end(), fabric.rank()) == members.end()) {
    return Status(Code::invalid_argument, "rank " + std::to_string(fabric.rank()) + " is not among the members of the group that it makes");
  }
  std::vector<int> sorted = members;
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    if (sorted[i] < 0 || sorted[i] >= fabric.world_size()) {
      return Status(Code::invalid_argument, "a group's members are ranks from 0 to " + std::to_string(fabric.world_size() - 1) + "; " +
                                                std::to_string(sorted[i]) + " is none");
    }
    if (i > 0 && sorted[i] == sorted[i - 1])
      return Status(Code::invalid_argument, "rank " + std::to_string(sorted[i]) + " is named twice in one group");
  }
  return {};
}

// The same answer on every member.
bool share_a_region(transport::Fabric& fabric, const std::vector<int>& members) {
  if (members.size() < 2 || fabric.region() == nullptr) return false;
  const auto local = fabric.region()->ranks();
  return std::all_of(members.begin(), members.end(),
                     [&](int member) { return std::find(local.begin(), local.end(), member) != local.end(); });
}

// Where nobody else must agree.
Result<Agreement> open_alone(transport::Fabric& fabric, const std::vector<int>& members) {
  auto channel = fabric.open(fabric.next_channel_id(), members);
  if (!channel.ok()) return channel.status();
  return Agreement{std::move(*channel), {kNoSegment, Selection(Ground::links, 1).bounds()}};
}

std::shared_ptr<Shared> shared_of(transport::Fabric& fabric) {
  return std::static_pointer_cast<Shared>(fabric.companion([] { return std::make_shared<Shared>(); }));
}

// What the first member of a group hands to all. Where the region is full, the group runs over links, on every member.
Result<Handout> hand_out(transport::Fabric& fabric, const Tuning* given, std::size_t members, bool use_region) {
  Result<Tuning> tuning = given != nullptr ? *given : tuning_of_environment();
  if (!tuning.ok()) return tuning.status();
  Handout handout{kNoSegment, {}};
  const int size = static_cast<int>(members);
  if (use_region) {
    auto segment = fabric.region()->claim(RegionGroup::segment_bytes(size));
    if (segment.ok()) handout.segment = *segment;
  }
  handout.bounds = select(*tuning, handout.segment == kNoSegment ? Ground::links : Ground::region, size).bounds();
  return handout;
}

std::shared_ptr<Communicator> assemble(std::shared_ptr<transport::Fabric> fabric, Agreement agreed, std::string name,
                                       std::shared_ptr<const trace::Witness> witness) {
  std::unique_ptr<RegionGroup> region_group;
  const Handout& handout = agreed.handout;
  if (handout.segment != kNoSegment) {
    const Selection selection(Ground::region, agreed.channel->size(), handout.bounds);
    region_group = RegionGroup::attach(*fabric->region(), handout.segment, *agreed.channel, selection);
  }
  auto shared = shared_of(*fabric);
  GroupContext context{std::move(fabric), std::move(agreed.channel), std::move(name), std::move(witness)};
  return std::make_shared<GroupCommunicator>(std::move(context), std::move(shared), std::move(region_group), handout);
}

std::string making(const CommunicatorOptions& options) {
  return "making " + (options.name.empty() ? std::string("a group") : "group '" + options.name + "'");
}

// What each member of a divided group says.
struct SplitNote {
  std::uint64_t id = 0;  // of the first member of a part: its channel; kGivenUp
  Handout handout = {};
};
constexpr std::uint64_t kGivenUp = ~std::uint64_t{0};

class Split {
 public:
  Split(Communicator& parent, const std::vector<std::vector<int>>& parts, TimePoint deadline)
      : parent_(parent), fabric_(parent.channel().fabric()), parts_(parts), deadline_(deadline) {}

  Status check() const {
    std::vector<bool> seen(static_cast<std::size_t>(parent_.size()));
    for (const auto& part : parts_) {
      if (part.empty()) return Status(Code::invalid_argument, "one of the parts that a group is divided into is empty");
      for (const int position : part) {
        if (position < 0 || position >= parent_.size())
          return Status(Code::invalid_argument,
                        "a group of " + std::to_string(parent_.size()) + " has no rank " + std::to_string(position));
        if (seen[static_cast<std::size_t>(position)])
          return Status(Code::invalid_argument, "rank " + std::to_string(position) + " is named twice in the parts of a group");
        seen[static_cast<std::size_t>(position)] = true;
      }
    }
    return {};
  }

  Result<std::optional<Agreement>> agree(bool use_region, const Tuning* tuning) {
    const auto part = std::find_if(parts_.begin(), parts_.end(),
                                   [this](const std::vector<int>& p) { return std::find(p.begin(), p.end(), parent_.rank()) != p.end(); });
    std::vector<int> members;
    if (part != parts_.end()) {
      for (const int position : *part) members.push_back(parent_.members()[static_cast<std::size_t>(position)]);
    }
    Result<Handout> mine = Handout{kNoSegment, {}};
    SplitNote note;
    if (!members.empty() && members.front() == fabric_.rank()) {
      mine = hand_out(fabric_, tuning, members.size(), use_region && share_a_region(fabric_, members));
      note = mine.ok() ? SplitNote{fabric_.next_channel_id(), *mine} : SplitNote{kGivenUp, {}};
    }
    if (Status heard = gather(note); !heard) return heard;
    if (const int who = given_up(); who >= 0) {
      if (mine.ok() && mine->segment != kNoSegment) fabric_.region()->release(mine->segment);
      if (!mine.ok()) return mine.status();
      return Status(Code::aborted, "rank " + std::to_string(who) + " gave it up; its own error says why");
    }
    if (members.empty()) return std::optional<Agreement>();
    const SplitNote& told = notes_[static_cast<std::size_t>(part->front())];
    auto channel = fabric_.open(static_cast<std::uint32_t>(told.id), members);
    if (!channel.ok()) return channel.status();
    return std::optional<Agreement>(Agreement{std::move(*channel), told.handout});
  }

 private:
  // The job rank of a member that cannot go on, or -1.
  int given_up() const {
    const auto found = std::find_if(notes_.begin(), notes_.end(), [](const SplitNote& note) { return note.id == kGivenUp; });
    return found == notes_.end() ? -1 : parent_.members()[static_cast<std::size_t>(found - notes_.begin())];
  }

  Status gather(const SplitNote& mine) {
    notes_.assign(static_cast<std::size_t>(parent_.size()), {});
    Args args;
    args.op = Op::all_gather;
    args.dtype = DType::int64;
    args.inputs = {std::as_bytes(std::span(&mine, 1))};
    for (auto& note : notes_) args.outputs.push_back(std::as_writable_bytes(std::span(&note, 1)));
    return parent_.run(args, deadline_);
  }

  Communicator& parent_;
  transport::Fabric& fabric_;
  const std::vector<std::vector<int>>& parts_;
  const TimePoint deadline_;
  std::vector<SplitNote> notes_;
};

}  // namespace

Result<std::shared_ptr<Communicator>> Communicator::create(std::shared_ptr<transport::Fabric> fabric, std::vector<int> members,
                                                           CommunicatorOptions options) {
  const std::string what = making(options);
  if (Status valid = check_members(*fabric, members); !valid) return valid.with_context(what);
  const TimePoint deadline = deadline_after(fabric->clock(), options.timeout);
  const bool region = options.use_region && share_a_region(*fabric, members);
  const auto decide = [&] { return hand_out(*fabric, options.tuning.get(), members.size(), region); };
  const std::string key = options.terms.empty() ? options.name : options.name + "\n" + options.terms;
  auto agreed = members.size() == 1
                    ? open_alone(*fabric, members)
                    : agree(*fabric, members, key, shared_of(*fabric)->next_use(members, key), deadline, decide, options.give_up);
  if (!agreed.ok()) {
    Status failure = agreed.status();
    if (failure.code() == Code::timed_out && options.witness)
      failure = Status(failure.code(), failure.message() + options.witness->tell(options.name, failure.ranks()), failure.ranks());
    return failure.with_context(what + " on rank " + std::to_string(fabric->rank()));
  }
  return assemble(std::move(fabric), std::move(agreed).value(), std::move(options.name), std::move(options.witness));
}

Result<std::shared_ptr<Communicator>> Communicator::split(const std::shared_ptr<Communicator>& parent,
                                                          const std::vector<std::vector<int>>& parts, CommunicatorOptions options) {
  auto& group = static_cast<GroupCommunicator&>(*parent);
  Split split(group, parts, deadline_after(group.fabric()->clock(), options.timeout));
  Status valid = split.check();
  if (!valid) return valid.with_context(making(options));
  auto agreed = split.agree(options.use_region, options.tuning.get());
  if (!agreed.ok()) return agreed.status().with_context(making(options));
  if (!agreed->has_value()) return std::shared_ptr<Communicator>();
  return assemble(group.fabric(), std::move(**agreed), std::move(options.name), std::move(options.witness));
}

}  // namespace muster::collective
