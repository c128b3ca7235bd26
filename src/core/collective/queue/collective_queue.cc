// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/queue/collective_queue.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/collective/call.h"
#include "core/collective/creation/group_creation.h"
#include "core/collective/op.h"
#include "core/tunables/tunables.h"
#include "core/wait/spin_wait.h"

namespace muster::collective {
CollectiveQueue::CollectiveQueue(const GroupContext& group, std::unique_ptr<RegionGroup> region,
                                 const GroupDescriptor& descriptor)
    : group_(group),
      control_(group),
      selection_(Medium::network, group.size(), descriptor.bounds,
                 placement_of(*group.fabric, group.channel->members(), descriptor)),
      links_(*group.channel, selection_),
      region_(std::move(region)) {
  if (group.size() > 1) control_.listen();
}

void CollectiveQueue::abandon(Operation& operation) {
  const std::lock_guard drive(calls_.state());
  calls_.remove(operation);
}

Status CollectiveQueue::run(Driver& driver, const Args& args, CallRecord& record,
                            InlineCall& started_inline) {
  record.arm();
  record.completed_inline = false;
  Operation operation(*this, nullptr, record.deadline);
  operation.args_ = &args;
  operation.created_at_ = record.begun == TimePoint() ? group_.now() : record.begun;
  if (region_ == nullptr) operation.memory_ = memory_of(args);
  if (started_inline.holds_lock()) {
    operation.call_ = started_inline.fingerprint;
    operation.remembered_ = started_inline.remembered;
    operation.task_ = started_inline.release_task();
    operation.begun_ = operation.task_.valid();
    if (operation.begun_) operation.links_ = &links_;
    calls_.push_front(operation);
    started_inline.release_lock();
  } else {
    calls_.push_back(operation, false);
  }
  record.on_started(operation.call_.sequence);
  return wait_for(driver, operation);
}

/// Returns once the call has ended, even if an exception is thrown meanwhile, because its memory
/// belongs to the caller.
Status CollectiveQueue::wait_for(Driver& driver, const Operation& operation) {
  while (!operation.published()) {
    try {
      driver.drive_until([&operation] { return operation.published(); }, TimePoint::max());
    } catch (...) {
      static_cast<void>(group_.fail_by_exception(&operation.call_));
    }
  }
  return operation.status();
}

std::shared_ptr<Operation> CollectiveQueue::start(std::shared_ptr<Driver> driver, Args args,
                                                  CallRecord& record, std::shared_ptr<void> owner,
                                                  bool unknown_to_driver) {
  record.arm();
  auto operation = std::make_shared<Operation>(*this, std::move(driver), record.deadline);
  operation->owned_ = std::move(args);
  operation->args_ = &operation->owned_;
  operation->owner_ = std::move(owner);
  operation->self_ = operation;
  operation->unknown_to_driver_ = unknown_to_driver;
  operation->created_at_ = group_.now();
  if (region_ == nullptr) operation->memory_ = memory_of(operation->owned_);
  if (record.prepare != nullptr) {
    operation->prepare_ = *record.prepare;
    operation->memory_.small = false;  // it begins after all earlier calls have ended
  }
  const std::uint64_t number = calls_.push_back(*operation, false);
  if (unknown_to_driver) unknown_to_driver_.fetch_add(1);
  additions_.fetch_add(1);
  record.on_started(number);
  return operation;
}

std::uint64_t CollectiveQueue::refuse(std::shared_ptr<Driver> driver, Op op) {
  auto operation = std::make_shared<Operation>(*this, std::move(driver), TimePoint::max());
  operation->owned_.op = op;
  operation->args_ = &operation->owned_;
  operation->self_ = operation;
  operation->created_at_ = group_.now();
  const std::uint64_t number = calls_.push_back(*operation, true);
  additions_.fetch_add(1);
  return number;
}

void CollectiveQueue::begin(Operation& operation, LinkGroup& links) {
  operation.begun_ = true;
  // A call that peers have been told about runs even so: everything that it needs may have arrived
  // before the failure.
  if (group_.channel->failed() && !operation.remembered_) return;
  if (operation.prepare_) {
    if (Status ready = operation.prepare_(); !ready.ok())
      return group_.channel->fail(std::move(ready));
  }
  group_.channel->begin(operation.call_);
  if (!operation.remembered_) control_.begin(operation.call_);
  if ((operation.call_.flags & kRefused) != 0 && region_ == nullptr)
    return control_.report_refused();
  operation.task_ = region_ ? region_->run(*operation.args_, operation.call_)
                            : links.run(*operation.args_, operation.call_);
  operation.links_ = &links;
}

// Starts small calls that follow a small running call, and advances them: their messages need not
// wait for its replies.
void CollectiveQueue::pipeline(const Operation& first) {
  if (region_ || calls_.state().number() == first.call_.sequence) return;
  std::array<Operation*, fixed::kInFlight> window;
  const std::size_t number = calls_.first(window);
  for (std::size_t i = 1; i < number; ++i) {
    Operation& next = *window[i];
    if (!next.begun_) {
      if (!next.memory_.small || !window[i - 1]->memory_.small) return;
      if (!std::all_of(window.begin(), window.begin() + static_cast<std::ptrdiff_t>(i),
                       [&](const Operation* o) { return o->memory_.is_apart(next.memory_); }))
        return;
      auto& links = pipelined_[next.call_.sequence % fixed::kInFlight];
      if (links == nullptr) links = std::make_unique<LinkGroup>(*group_.channel, selection_);
      begin(next, *links);
    }
    if (next.task_.valid()) next.task_.step();
  }
}

// Transfers of the running call.
const OutstandingTransfers& CollectiveQueue::outstanding() {
  const Operation* running = calls_.front();
  return (running != nullptr && running->links_ != nullptr ? *running->links_ : links_)
      .outstanding();
}

Status CollectiveQueue::outcome(Operation& operation) {
  Status status = operation.task_.valid() ? operation.task_.peek() : group_.channel->failure();
  // A pipelined call that completed after an earlier one failed fails too.
  if (status.ok() && broken_) status = group_.channel->failure();
  if (status.ok()) return status;
  broken_ = true;
  // The channel's failure is the first cause; this task may only have seen its consequences.
  if (group_.channel->failed()) status = group_.channel->failure();
  return status.with_context(group_.call_text(operation.call_));
}

/// For a call whose task has ended. If it failed by an exception, no peer knows yet, and its
/// transfers are outstanding until the channel ends.
bool CollectiveQueue::has_quiesced(Operation& operation) {
  if (!operation.task_.valid() || operation.task_.peek().ok()) [[likely]]
    return true;
  if (!group_.channel->failed()) {
    const Status& why = operation.task_.peek();
    group_.channel->fail(
        Status(why.code(), group_.call_text(operation.call_) + " failed there: " + why.message(),
               why.ranks().empty() ? std::vector<int>{group_.job_rank()} : why.ranks()));
  }
  return operation.links_ == nullptr || operation.links_->quiesced();
}

/// The calls that ended in a pass; released without holding a lock.
struct CollectiveQueue::Ended {
  struct SharedCall {
    std::shared_ptr<Operation> operation;
    Completion::Notices notices;
    std::shared_ptr<Driver> driver;
    std::shared_ptr<void> owner;
  };
  std::vector<SharedCall> shared;
  bool any = false;
};

/// Completes a call without outstanding transfers.
void CollectiveQueue::finish(Operation& operation, Ended& ended) {
  Status status = outcome(operation);
  const bool shared = operation.self_ != nullptr;
  if (shared) ended.shared.emplace_back();  // nothing below throws
  // Removed before it is published: a blocking call is gone as soon as its thread sees the result.
  calls_.remove(operation);
  operation.task_ = Task<Status>();
  ended.any = true;
  if (!shared) return operation.publish_unshared(std::move(status));
  Ended::SharedCall& call = ended.shared.back();
  call.operation = std::move(operation.self_);
  if (operation.unknown_to_driver_) unknown_to_driver_.fetch_sub(1);
  call.notices = operation.publish(std::move(status));
  {
    const std::lock_guard guard(operation.lock_);
    call.driver = std::move(operation.driver_);
    call.owner = std::move(operation.owner_);
  }
  for (const auto& notice : call.notices) notice(operation.status());
}

/// Under the drive lock.
void CollectiveQueue::drive_pass(Ended& ended, int self) {
  if (control_.news()) control_.poll();
  std::optional<transport::SendBatch> batch;
  while (Operation* operation = calls_.front()) {
    // If other calls follow, their messages share writes. A single call is faster without a batch.
    if (!region_ && !batch && calls_.state().number() != operation->call_.sequence)
      batch.emplace(*group_.fabric);
    if (!operation->begun_) begin(*operation, links_);
    Task<Status>& task = operation->task_;
    const std::size_t turns = task.turns();
    const bool over = !task.valid() || task.step();
    if (self > 0 && task.turns() != turns) note_progress();
    if (!over) {
      if (region_ && group_.channel->someone_left() && fail_if_awaited_left())
        continue;  // the next step ends it
      return pipeline(*operation);
    }
    if (!has_quiesced(*operation)) return;
    finish(*operation, ended);
  }
}

void CollectiveQueue::advance(const std::atomic<int>& waiting, int self) {
  Ended ended;
  {
    const std::unique_lock drive(calls_.state(), std::try_to_lock);
    if (!drive.owns_lock()) return;
    try {
      drive_pass(ended, self);
    } catch (...) {
      const Operation* running = calls_.front();
      static_cast<void>(group_.fail_by_exception(running != nullptr ? &running->call_ : nullptr));
    }
  }
  if (ended.any && waiting.load() > self) group_.fabric->wake();
}

/// In a region, no message announces that a member sends nothing more: its line or its data is just
/// missing. Fails the channel in that case. Data that a member provided before it left counts.
bool CollectiveQueue::fail_if_awaited_left() {
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
  return calls_.next_deadline();
}

std::vector<int> CollectiveQueue::awaited() {
  return region_ ? region_->awaited() : outstanding().awaited();
}

std::string CollectiveQueue::deadline_text(const Operation& late, TimePoint now,
                                           const trace::PeerReport& known) {
  const auto& missing = known.missing;
  const Operation* running = calls_.front();
  std::string text = "rank " + std::to_string(group_.job_rank()) + " waited " +
                     describe(now - late.created_at_) + " for " +
                     (missing.empty() ? "no particular rank" : describe_ranks(missing)) + " in " +
                     fingerprint_rules().describe(late.call_) + ", call " +
                     std::to_string(late.call_.sequence) + " of " + group_.text();
  if (running != &late && running != nullptr) {
    text += ", queued behind " + fingerprint_rules().describe(running->call_) + ", call " +
            std::to_string(running->call_.sequence);
  }
  if (!known.text.empty()) text += ": " + known.text;
  for (int member = 0; known.text.empty() && member < group_.size(); ++member) {
    const int rank = group_.job_rank_of(member);
    if (missing.size() > 8 || std::find(missing.begin(), missing.end(), rank) == missing.end())
      continue;
    const transport::Fingerprint heard =
        region_ ? region_->heard(member) : outstanding().heard(member);
    if (heard.sequence == 0) continue;
    text += "; the last heard of rank " + std::to_string(rank) + " is its call " +
            std::to_string(heard.sequence) + ", " + fingerprint_rules().describe(heard);
  }
  return text +
         (group_.peer_traces
              ? ". See what the ranks named here are doing (`muster trace` shows the "
                "last calls of all); if they are only slow, "
              : ". See whether the ranks named here have reached this call; if they are "
                "only slow, ") +
         "give the call or the group a longer timeout";
}

void CollectiveQueue::check_deadlines(TimePoint now) {
  const std::unique_lock drive(calls_.state(), std::try_to_lock);
  if (!drive.owns_lock() || group_.channel->failed()) return;
  const Operation* const late = calls_.find_late(now);
  if (late == nullptr) return;
  // An awaited member may itself wait for another one, so the traces tell which members have not
  // entered the call.
  trace::PeerReport known{awaited(), {}};
  if (group_.peer_traces) {
    const Operation* running = calls_.front();
    const auto sequence = running != nullptr ? running->call_.sequence : late->call_.sequence;
    known = trace::report_peers(group_.peer_traces->look(), group_.name, sequence,
                                group_.channel->members(), group_.job_rank(), known.missing);
  }
  group_.channel->fail(Status(Code::timed_out, deadline_text(*late, now, known), known.missing));
}

void CollectiveQueue::remind(TimePoint now) {
  if (region_ != nullptr || group_.size() == 1)
    return;  // in a region every member sees every control line
  const std::unique_lock drive(calls_.state(), std::try_to_lock);
  if (!drive.owns_lock() || group_.channel->failed()) return;
  control_.all_sent();
  Operation* running = calls_.front();
  if (running == nullptr || !running->begun_) return;
  if (!running->reminders_.due(running->created_at_, now)) return;
  for (int rank : awaited()) {
    const auto members = group_.channel->members();
    control_.report_waiting(
        static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin()),
        running->call_);
  }
}

void CollectiveQueue::drop_region() {
  const std::lock_guard drive(calls_.state());
  region_.reset();
  control_.cancel();
}

bool InlineCall::run_bounded(Driver& driver) {
  if (queue_.region_ != nullptr)
    return queue_.region_->inline_calls().may_block() && !driver.busy() && run_in_region();
  if (queue_.group_.size() > 1) return !driver.busy() && run_over_links();
  on_started();
  run_single_rank(args_);
  return true;
}

/// Leaves the rest in `task_` if it does not complete within a round trip, or has failed.
bool InlineCall::run_over_links() {
  if (!memory_of(args_).small) return false;
  const GroupContext& group = queue_.group_;
  group.channel->begin(fingerprint);
  remember();
  task_ = queue_.links_.run(args_, fingerprint);
  task_.step();
  on_started();
  const TimePoint end = std::min(record.deadline, group.now() + tunables().round_trip);
  return group.fabric->wait([this] { return task_.step(); }, end) && task_.peek().ok();
}

/// Recorded before the first byte moves, so that the traces of a killed member show the call. For
/// up to one round trip, the thread polls only for this call.
bool InlineCall::run_in_region() {
  record.completed_inline = false;
  queue_.group_.channel->begin(fingerprint);
  on_started();
  task_ = queue_.region_->run(args_, fingerprint);
  return queue_.region_->inline_calls().drive_until(task_, record.deadline) && task_.peek().ok();
}

}  // namespace muster::collective
