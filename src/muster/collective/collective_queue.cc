#include "muster/collective/collective_queue.h"

#include <cxxabi.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "muster/base/exception_status.h"
#include "muster/collective/alone.h"
#include "muster/collective/call.h"
#include "muster/collective/making.h"
#include "muster/collective/op.h"
#include "muster/transport/core_sharing.h"
#include "muster/transport/headway.h"

namespace muster::collective {
namespace {

/// A call that has waited so long tells those it waits for what it is; then again, a few times,
/// later.
constexpr auto kReminder = std::chrono::milliseconds(100);
constexpr int kReminders = 5;
/// Calls of at most so much memory may be under way beside others.
constexpr std::size_t kSmallBytes = 32 * 1024;

template <class Slices>
MemoryRange range_of(const Slices& slices, std::size_t& bytes) {
  MemoryRange range;
  for (const auto& slice : slices) {
    if (slice.empty()) continue;
    bytes += slice.size();
    const auto low = reinterpret_cast<std::uintptr_t>(slice.data());
    range.low = range.high == 0 ? low : std::min(range.low, low);
    range.high = std::max(range.high, low + slice.size());
  }
  return range;
}

}  // namespace

/// A call that takes no place in the queue yet: remembered for later comparisons once it has begun,
/// beside what the caller does then.
struct CollectiveQueue::Underway final : Meanwhile {
  Underway(Control& known, const transport::Fingerprint& like, std::uint64_t sequence,
           Meanwhile& other)
      : control(known), caller(other) {
    transport::copy_words(call, like);
    call.sequence = sequence;
  }
  /// Before anything of it is sent to members that have told what they are in.
  void count() noexcept {
    if (!std::exchange(counted, true)) control.begin(call);
  }
  TimePoint begun() noexcept override {
    count();
    told = true;
    return deadline = caller.begun();
  }

  Control& control;
  transport::Fingerprint call;
  Meanwhile& caller;
  TimePoint deadline;
  bool counted = false;
  bool told = false;
  Task<Status> task;  // where the call is more than a line
};

CollectiveQueue::CollectiveQueue(const GroupContext& group, std::unique_ptr<RegionGroup> region,
                                 const Selection::Bounds& bounds)
    : group_(group),
      control_(group),
      selection_(Ground::links, group.size(), bounds,
                 standing_of(*group.fabric, group.channel->members())),
      links_(*group.channel, selection_),
      region_(std::move(region)) {
  if (group.size() > 1) control_.listen();
}

CollectiveQueue::Operation::~Operation() {
  if (queued_ && !published()) queue_.abandon(*this);
}

std::shared_ptr<Driver> CollectiveQueue::Operation::driver() const {
  const std::lock_guard guard(const_cast<Operation*>(this)->lock_);
  return driver_;
}

bool CollectiveQueue::Operation::done() const {
  if (published()) return true;
  if (const auto driver = this->driver()) {
    driver->fabric()->poll();
    driver->look_in();
    if (!published() && queue_.group_.now() >= deadline_) {
      driver->check_deadlines(queue_.group_.now());
      driver->look_in();
    }
  }
  return published();
}

Status CollectiveQueue::Operation::wait(TimePoint deadline) {
  if (published()) return status();
  const auto driver = this->driver();
  if (driver != nullptr && !driver->attend([this] { return published(); }, deadline)) {
    return Status(Code::timed_out, "the wait for " + fingerprint_rules().describe(call_) + " of " +
                                       queue_.group_.here() +
                                       " has reached its own limit; the call goes on");
  }
  return status();
}

/// What must be known of a call for others to be under way beside it.
void CollectiveQueue::note_memory(Operation& operation, const Args& args) const {
  if (region_) return;
  std::size_t bytes = 0;
  operation.reads_ = range_of(args.inputs, bytes);
  operation.writes_ = range_of(args.outputs, bytes);
  operation.small_ = bytes <= kSmallBytes;
}

/// Under the queue's lock.
void CollectiveQueue::add(Operation& operation, bool first) noexcept {
  operation.queued_ = true;
  if (first_ == nullptr) {
    first_ = last_ = &operation;
  } else if (first) {
    operation.next_ = std::exchange(first_, &operation);
  } else {
    last_ = last_->next_ = &operation;
  }
}

void CollectiveQueue::enqueue(Operation& operation, const Args& args, bool refused) noexcept {
  operation.args_ = &args;
  if (operation.made_ == TimePoint()) operation.made_ = group_.now();
  if (!refused) note_memory(operation, args);
  state_.prepare();
  const std::lock_guard guard(lock_);
  add(operation, false);
  const std::uint64_t sequence = state_.queue_next();
  operation.call_ = refused ? refusal_of(args.op, sequence) : fingerprint_of(args, sequence);
}

/// What is thrown fails the call, which ends like any other that has failed.
bool CollectiveQueue::tries_express(Driver& driver, Underway& underway, const Args& args) {
  try {
    return express(driver, underway, args);
  } catch (...) {
    static_cast<void>(fail_by_exception(&underway.call));
    return false;
  }
}

/// The whole call at once, where that takes but a moment. Under the drive lock.
bool CollectiveQueue::express(Driver& driver, Underway& underway, const Args& args) {
  if (control_.news()) control_.poll();
  if (group_.channel->failed()) return false;
  if (region_)
    return region_->try_inline(args, underway.call, underway) ||
           (region_->may_block() && !driver.busy() && in_region(underway, args));
  if (group_.size() > 1) return !driver.busy() && over_links(underway, args);
  underway.begun();
  run_alone(args);
  return true;
}

/// A small call, where nothing else of the group is to be done meanwhile. Leaves the task to
/// `go_on` where it is not over in a moment, or has failed.
bool CollectiveQueue::over_links(Underway& underway, const Args& args) {
  std::size_t bytes = 0;
  range_of(args.inputs, bytes);
  range_of(args.outputs, bytes);
  if (bytes > kSmallBytes) return false;
  group_.channel->begin(underway.call);
  underway.count();
  Task<Status>& task = underway.task = links_.run(args, underway.call);
  task.step();
  underway.begun();
  const TimePoint end = std::min(underway.deadline, group_.now() + transport::kRoundTrip);
  return group_.fabric->wait([&task] { return task.step(); }, end) && task.peek().ok();
}

/// A larger call, where nothing else of the group is to be done: for a moment its thread looks at
/// nothing but what the call waits for. Told before its first byte moves: whoever is killed
/// meanwhile was in it. Leaves the task to `go_on` like `over_links`.
bool CollectiveQueue::in_region(Underway& underway, const Args& args) {
  underway.at_once = false;
  group_.channel->begin(underway.call);
  if (!underway.told) underway.begun();
  Task<Status>& task = underway.task = region_->run(args, underway.call);
  return region_->drive_until(task, underway.deadline) && task.peek().ok();
}

void CollectiveQueue::remove(Operation& operation) noexcept {
  state_.prepare();
  const std::lock_guard guard(lock_);
  Operation* before = nullptr;
  for (Operation* each = first_; each != &operation; each = each->next_) {
    if (each == nullptr) return;
    before = each;
  }
  (before == nullptr ? first_ : before->next_) = operation.next_;
  if (last_ == &operation) last_ = before;
  operation.next_ = nullptr;
  if (first_ == nullptr) state_.set_queued(false);
}

/// The thread that waits for it is being ended. No other may be in it then.
void CollectiveQueue::abandon(Operation& operation) {
  const std::lock_guard drive(state_);
  remove(operation);
}

Status CollectiveQueue::fail_by_exception(const transport::Fingerprint* call) noexcept {
  const Status thrown = status_of_exception();
  try {
    const std::string where = call != nullptr ? call_text(*call) : group_.here();
    group_.channel->fail(
        Status(thrown.code(), where + " failed there: " + thrown.message(), {group_.job_rank()}));
    return group_.channel->failure();
  } catch (...) {
    return thrown;
  }
}

Status CollectiveQueue::run(Driver& driver, const Args& args, Meanwhile& meanwhile) {
  const std::uint64_t sequence = state_.try_lock_as_next();
  if (sequence == 0) {
    Operation operation(*this, nullptr, meanwhile.begun());
    operation.made_ = meanwhile.since();
    enqueue(operation, args);
    return attend(driver, operation);
  }
  std::unique_lock drive(state_, std::adopt_lock);
  Underway underway(control_,
                    recall_(outline_of(args), [&args] { return fingerprint_of(args, 0); }),
                    sequence, meanwhile);
  if (!tries_express(driver, underway, args))
    return go_on(driver, args, underway, std::move(drive));
  meanwhile.at_once = underway.at_once;
  drive.unlock();
  if (!empty() || driver.attended()) driver.let_others_go_on();
  return {};
}

/// With a call that the express way has not ended: it stands in the queue, before what came later.
Status CollectiveQueue::go_on(Driver& driver, const Args& args, Underway& underway,
                              std::unique_lock<QueueState> drive) {
  Operation operation(*this, nullptr, underway.told ? underway.deadline : underway.caller.begun());
  operation.call_ = underway.call;
  operation.counted_ = underway.counted;
  operation.args_ = &args;
  operation.made_ = underway.caller.since();
  if (operation.made_ == TimePoint()) operation.made_ = group_.now();
  note_memory(operation, args);
  if (underway.task.valid()) {
    operation.begun_ = true;
    operation.links_ = &links_;
    operation.task_ = std::move(underway.task);
  }
  {
    const std::lock_guard guard(lock_);
    add(operation, true);
    state_.set_queued(true);
  }
  drive.unlock();
  return attend(driver, operation);
}

/// Returns once the call has ended, whatever is thrown meanwhile: its memory is the caller's.
Status CollectiveQueue::attend(Driver& driver, const Operation& operation) {
  while (!operation.published()) {
    try {
      driver.attend([&operation] { return operation.published(); }, TimePoint::max());
    } catch (const abi::__forced_unwind&) {  // the thread is being ended
      throw;
    } catch (...) {
      static_cast<void>(fail_by_exception(&operation.call_));
    }
  }
  return operation.status();
}

std::shared_ptr<CollectiveQueue::Operation> CollectiveQueue::start(std::shared_ptr<Driver> driver,
                                                                   Args args, TimePoint deadline,
                                                                   std::shared_ptr<void> owner,
                                                                   bool beside) {
  auto operation = std::make_shared<Operation>(*this, std::move(driver), deadline);
  operation->owned_ = std::move(args);
  operation->owner_ = std::move(owner);
  operation->self_ = operation;
  operation->beside_ = beside;
  enqueue(*operation, operation->owned_);
  if (beside) beside_.fetch_add(1);
  additions_.fetch_add(1);
  return operation;
}

void CollectiveQueue::refuse(std::shared_ptr<Driver> driver, Op op) {
  auto operation = std::make_shared<Operation>(*this, std::move(driver), TimePoint::max());
  operation->owned_.op = op;
  operation->self_ = operation;
  enqueue(*operation, operation->owned_, true);
  additions_.fetch_add(1);
}

CollectiveQueue::Operation* CollectiveQueue::front() {
  const std::lock_guard guard(lock_);
  return first_;
}

/// "all_reduce of 3 float32, call 7 of group 'world' on rank 2".
std::string CollectiveQueue::call_text(const transport::Fingerprint& call) const {
  return fingerprint_rules().describe(call) + ", call " + std::to_string(call.sequence) + " of " +
         group_.here();
}

void CollectiveQueue::begin(Operation& operation, LinkGroup& links) {
  operation.begun_ = true;
  // What the others have been told already goes on: all that it needs may have come before the
  // failure.
  if (group_.channel->failed() && !operation.counted_) return;
  group_.channel->begin(operation.call_);
  if (!operation.counted_) control_.begin(operation.call_);
  if ((operation.call_.flags & kRefused) != 0 && region_ == nullptr) return control_.tell_refused();
  operation.task_ = region_ ? region_->run(*operation.args_, operation.call_)
                            : links.run(*operation.args_, operation.call_);
  operation.links_ = &links;
}

// Small calls behind a small one that is under way begin too, and go on as far as they can: their
// messages need not wait for its answers.
void CollectiveQueue::go_ahead(const Operation& first) {
  if (region_ || state_.number() == first.call_.sequence) return;
  std::array<Operation*, kTogether> window;
  std::size_t number = 0;
  {
    const std::lock_guard guard(lock_);
    for (Operation* each = first_; each != nullptr && number < kTogether; each = each->next_)
      window[number++] = each;
  }
  const auto apart = [](const Operation& a, const Operation& b) {
    return !a.writes_.meets(b.writes_) && !a.writes_.meets(b.reads_) && !a.reads_.meets(b.writes_);
  };
  for (std::size_t i = 1; i < number; ++i) {
    Operation& next = *window[i];
    if (!next.begun_) {
      if (!next.small_ || !window[i - 1]->small_) return;
      if (!std::all_of(window.begin(), window.begin() + static_cast<std::ptrdiff_t>(i),
                       [&](const Operation* o) { return apart(*o, next); }))
        return;
      auto& links = ahead_[next.call_.sequence % kTogether];
      if (links == nullptr) links = std::make_unique<LinkGroup>(*group_.channel, selection_);
      begin(next, *links);
    }
    if (next.task_.valid()) next.task_.step();
  }
}

// Of the call under way.
const Flight& CollectiveQueue::flight() {
  const Operation* running = front();
  return (running != nullptr && running->links_ != nullptr ? *running->links_ : links_).flight();
}

Status CollectiveQueue::outcome(Operation& operation) {
  Status status = operation.task_.valid() ? operation.task_.peek() : group_.channel->failure();
  // What was under way beside a call that failed, and got through, comes after it all the same.
  if (status.ok() && broken_) status = group_.channel->failure();
  if (status.ok()) return status;
  broken_ = true;
  // The channel's failure is the first cause; what this task saw may only be what followed from it.
  if (group_.channel->failed()) status = group_.channel->failure();
  return status.with_context(call_text(operation.call_));
}

/// Of a call whose task has ended. One that has failed by itself, by an exception, has told nobody
/// yet, and leaves transfers under way, which end with the channel.
bool CollectiveQueue::comes_to_rest(Operation& operation) {
  if (!operation.task_.valid() || operation.task_.peek().ok()) [[likely]]
    return true;
  if (!group_.channel->failed()) {
    const Status& why = operation.task_.peek();
    group_.channel->fail(
        Status(why.code(), call_text(operation.call_) + " failed there: " + why.message(),
               why.ranks().empty() ? std::vector<int>{group_.job_rank()} : why.ranks()));
  }
  return operation.links_ == nullptr || operation.links_->at_rest();
}

/// What ended in a pass; let go of once no lock is held.
struct CollectiveQueue::Ended {
  struct Call {
    std::shared_ptr<Operation> operation;
    Completion::Notices notices;
    std::shared_ptr<Driver> driver;
    std::shared_ptr<void> owner;
  };
  std::vector<Call> shared;
  bool any = false;
};

/// Under the drive lock.
void CollectiveQueue::pass(Ended& ended, int self) {
  if (control_.news()) control_.poll();
  std::optional<transport::SendBatch> batch;
  while (Operation* operation = front()) {
    // With others behind it, what it sends may travel with what they send; a call alone sends
    // sooner without.
    if (!region_ && !batch && state_.number() != operation->call_.sequence)
      batch.emplace(*group_.fabric);
    if (!operation->begun_) begin(*operation, links_);
    Task<Status>& task = operation->task_;
    const std::size_t turns = task.turns();
    const bool over = !task.valid() || task.step();
    if (self > 0 && task.turns() != turns) transport::note_headway();
    if (!over) {
      if (region_ && group_.channel->someone_left() && waits_for_one_that_left())
        continue;  // ends it
      return go_ahead(*operation);
    }
    if (!comes_to_rest(*operation)) return;
    Status status = outcome(*operation);
    const bool shared = operation->self_ != nullptr;
    if (shared) ended.shared.emplace_back();  // from here on nothing throws
    remove(*operation);
    task = Task<Status>();
    ended.any = true;
    if (!shared) {
      operation->publish_unshared(std::move(status));
      continue;
    }
    Ended::Call& call = ended.shared.back();
    call.operation = std::move(operation->self_);
    if (operation->beside_) beside_.fetch_sub(1);
    call.notices = operation->publish(std::move(status));
    {
      const std::lock_guard guard(operation->lock_);
      call.driver = std::move(operation->driver_);
      call.owner = std::move(operation->owner_);
    }
    for (const auto& notice : call.notices) notice(operation->status());
  }
}

void CollectiveQueue::advance(const std::atomic<int>& attending, int self) {
  Ended ended;
  {
    const std::unique_lock drive(state_, std::try_to_lock);
    if (!drive.owns_lock()) return;
    try {
      pass(ended, self);
    } catch (...) {
      const Operation* running = front();
      static_cast<void>(fail_by_exception(running != nullptr ? &running->call_ : nullptr));
    }
  }
  if (ended.any && attending.load() > self) group_.fabric->wake();
}

/// In a region no message tells that nothing more comes of a member: its line is missing, or its
/// part of the call. Fails the channel then; what a member did before it left counts.
bool CollectiveQueue::waits_for_one_that_left() {
  if (group_.channel->failed()) return false;
  for (const int rank : region_->awaited()) {
    Status left = group_.fabric->gone(rank);
    if (left.ok()) continue;
    group_.channel->fail(std::move(left));
    return true;
  }
  return false;
}

TimePoint CollectiveQueue::next_deadline() {
  if (group_.channel->failed()) return TimePoint::max();
  const std::lock_guard guard(lock_);
  TimePoint earliest = TimePoint::max();
  for (const Operation* each = first_; each != nullptr; each = each->next_)
    earliest = std::min(earliest, each->deadline_);
  return earliest;
}

std::vector<int> CollectiveQueue::awaited() {
  return region_ ? region_->awaited() : flight().awaited();
}

std::string CollectiveQueue::late_text(const Operation& late, TimePoint now,
                                       const trace::Testimony& known) {
  const auto& missing = known.missing;
  const Operation* running = front();
  std::string text = "rank " + std::to_string(group_.job_rank()) + " waited " +
                     describe(now - late.made_) + " in " +
                     fingerprint_rules().describe(late.call_) + ", call " +
                     std::to_string(late.call_.sequence) + " of " + group_.text();
  if (running != &late && running != nullptr) {
    text += ", queued behind " + fingerprint_rules().describe(running->call_) + ", call " +
            std::to_string(running->call_.sequence) + ",";
  }
  text += missing.empty() ? ", for nobody in particular" : " for " + describe_ranks(missing);
  if (!known.text.empty()) text += ": " + known.text;
  for (int member = 0; known.text.empty() && member < group_.size(); ++member) {
    const int rank = group_.job_rank_of(member);
    if (missing.size() > 8 || std::find(missing.begin(), missing.end(), rank) == missing.end())
      continue;
    const transport::Fingerprint heard = region_ ? region_->heard(member) : flight().heard(member);
    if (heard.sequence == 0) continue;
    text += "; the last heard of rank " + std::to_string(rank) + " is its call " +
            std::to_string(heard.sequence) + ", " + fingerprint_rules().describe(heard);
  }
  return text +
         (group_.witness ? ". See what the ranks named here are doing (`muster trace` shows the "
                           "last calls of all); if they are only slow, "
                         : ". See whether the ranks named here have reached this call; if they are "
                           "only slow, ") +
         "give the call or the group a longer timeout";
}

void CollectiveQueue::check_deadlines(TimePoint now) {
  const std::unique_lock drive(state_, std::try_to_lock);
  if (!drive.owns_lock() || group_.channel->failed()) return;
  const Operation* late = nullptr;
  {
    const std::lock_guard guard(lock_);
    for (const Operation* each = first_; each != nullptr; each = each->next_) {
      if (each->deadline_ <= now && (late == nullptr || each->deadline_ < late->deadline_))
        late = each;
    }
  }
  if (late == nullptr) return;
  // Whom this member waits for may itself wait for another: who has not entered the call is asked
  // of the traces.
  trace::Testimony known{awaited(), {}};
  if (group_.witness) {
    const Operation* running = front();
    const auto sequence = running != nullptr ? running->call_.sequence : late->call_.sequence;
    known = trace::testify(group_.witness->look(), group_.name, sequence, group_.channel->members(),
                           group_.job_rank(), known.missing);
  }
  group_.channel->fail(Status(Code::timed_out, late_text(*late, now, known), known.missing));
}

void CollectiveQueue::remind(TimePoint now) {
  if (region_ != nullptr || group_.size() == 1)
    return;  // in a region everybody sees everybody's control line
  const std::unique_lock drive(state_, std::try_to_lock);
  if (!drive.owns_lock() || group_.channel->failed()) return;
  control_.all_sent();
  Operation* running = front();
  if (running == nullptr || !running->begun_ || running->reminders_ >= kReminders) return;
  if (now - running->made_ < kReminder * (std::int64_t{1} << (2 * running->reminders_))) return;
  ++running->reminders_;
  for (int rank : awaited()) {
    const auto members = group_.channel->members();
    control_.tell_waiting(
        static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin()),
        running->call_);
  }
}

void CollectiveQueue::drop_region() {
  const std::lock_guard drive(state_);
  region_.reset();
  control_.cancel();
}

}  // namespace muster::collective
