// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/node/node_membership.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "core/base/bytes.h"
#include "core/base/descriptor.h"
#include "core/base/log/log.h"
#include "core/base/threads/thread_start.h"
#include "core/security/secret.h"

namespace muster::launch {
namespace {

using membership::NodePhase;

constexpr std::size_t kFailuresTold = 8;
// Before something is told again.
constexpr Duration kFirstPause = std::chrono::milliseconds(100);  // limit: pace of attempts
constexpr Duration kLongestPause = std::chrono::seconds(2);
constexpr Duration kLastWords = std::chrono::seconds(2);  // limit: of a node that leaves
constexpr std::size_t kRandomBytes = 8;

}  // namespace

NodeMembership::NodeMembership(std::unique_ptr<membership::Membership> membership,
                               NodeMembershipOptions options, NodeDetails details)
    : options_(std::move(options)),
      membership_(std::move(membership)),
      place_(
          {.service = options_.place, .out_limit = options_.out_limit, .last_call = options_.ttl}),
      details_(std::move(details)) {
  details_.identity = random_name(kRandomBytes);
  report_.wanted_slot = options_.wanted_slot;
  report_.host = details_.facts.host;
  report_.least_nodes = options_.epochs.min_nodes;
  report_.most_nodes = options_.epochs.max_nodes;
  report_.program_id = options_.epochs.program_id;
  report_.incarnation = details_.identity;
  report_.details = encode(details_);
}

Result<std::unique_ptr<NodeMembership>> NodeMembership::join(
    std::unique_ptr<membership::Membership> membership, NodeMembershipOptions options,
    NodeDetails details) {
  std::unique_ptr<NodeMembership> node(
      new NodeMembership(std::move(membership), std::move(options), std::move(details)));
  if (Status started = node->start(); !started) return started;
  return node;
}

Status NodeMembership::start() {
  event_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event_) return Status(Code::exhausted, "no event descriptor: " + errno_text(errno));
  {
    Lock lock(mutex_);
    if (Status taken = take_place(lock); !taken) return taken;
  }
  auto watch = membership_->watch("");
  if (!watch) return watch.status();
  watch_ = std::move(*watch);
  auto telling =
      start_thread("the thread that tells the job's nodes of this one", [this] { tell_all(); });
  if (!telling) return telling.status();
  telling_ = std::move(*telling);
  auto following =
      start_thread("the thread that follows the job's nodes", [this] { follow_all(); });
  if (!following) return following.status();
  following_ = std::move(*following);
  return {};
}

NodeMembership::~NodeMembership() {
  {
    Lock lock(mutex_);
    confirmed_.wait_for(lock, kLastWords, [this] {
      return !telling_.joinable() || !place_.hold() || unconfirmed_.empty();
    });
    stop_ = true;
  }
  closing_->raise("this node leaves the job");
  work_.notify_all();
  if (watch_) watch_->close();
  if (following_.joinable()) following_.join();
  if (telling_.joinable()) telling_.join();
}

std::string NodeMembership::next_name() const {
  return options_.wanted_slot >= 0 || name_.empty()
             ? options_.name
             : options_.name + ", " + random_name(kRandomBytes);
}

std::string NodeMembership::place() const {
  const Lock lock(mutex_);
  return place_.hold() ? name_ : std::string();
}

void NodeMembership::give_under_lock(NodeNotice notice) {
  notices_.push_back(std::move(notice));
  const std::uint64_t one = 1;
  // Fails only where the count is at its limit, and then the descriptor is readable.
  [[maybe_unused]] const ssize_t written = ::write(event_.get(), &one, sizeof one);
}

void NodeMembership::give(NodeNotice notice) {
  const Lock lock(mutex_);
  give_under_lock(std::move(notice));
}

std::vector<NodeNotice> NodeMembership::take() {
  const Lock lock(mutex_);
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(event_.get(), &count, sizeof count);
  return std::exchange(notices_, {});
}

/// For this node. Nothing more is told: no node needs it.
void NodeMembership::end_of_job(JobEnded end, bool service_lost) {
  const Lock lock(mutex_);
  over_ = true;
  drop_unconfirmed();
  proposed_.reset();
  give_under_lock({LauncherEvent(std::move(end)), {}, {}, 0, service_lost});
}

/// Under the lock.
void NodeMembership::publish() {
  report_.details = encode(details_);
  if (!place_.hold() || over_) return;
  unconfirmed_.push_back(membership::encode(report_));
  work_.notify_all();
}

void NodeMembership::report(NodePhase phase, std::int64_t epoch, int exit_code,
                            const std::string& reason, bool killed, std::int64_t trained_in) {
  const Lock lock(mutex_);
  report_.phase = phase;
  report_.killed = killed;
  report_.epoch = epoch;
  report_.exit_code = exit_code;
  report_.reason = reason;
  report_.trained_in = trained_in;
  publish();
}

void NodeMembership::report_trouble(std::int64_t epoch, const std::vector<int>& slots,
                                    const std::string& text, std::int64_t committed) {
  const Lock lock(mutex_);
  add_trouble(report_, epoch, slots, text, committed);
  publish();
}

void NodeMembership::note_state(const StateNote& note) {
  const Lock lock(mutex_);
  const auto counts = [this](std::int64_t in) { return seated_ && in > 0 && in >= joined_; };
  const bool is_gone = counts(note.gone_in) && note.gone_in != gone_in_;
  gone_in_ = note.gone_in;
  std::int64_t none_in = report_.none_in;
  // A loss of all of the state is told of by itself, and the same epoch may make the next one.
  if (is_gone || (note.epoch == 0 && counts(report_.state_in) && note.lost_in < note.running))
    none_in = note.running;
  else if (note.epoch > 0 && note.gone_in == 0)
    none_in = 0;
  const bool news = counts(note.epoch) != counts(report_.state_in) ||
                    (seated_ && none_in != report_.none_in) ||
                    (counts(note.epoch) && note.divided != report_.state_divided) ||
                    (is_first_ && note.epoch != report_.state_in) ||
                    note.lost_in != report_.lost_in || note.kept_in != report_.kept_in;
  report_.none_in = none_in;
  report_.state_in = note.epoch;
  report_.state_divided = note.divided;
  report_.committed = note.committed;
  report_.lost_in = note.lost_in;
  report_.kept_in = note.kept_in;
  if (news) publish();
}

void NodeMembership::report_ending(std::int64_t epoch) {
  const Lock lock(mutex_);
  report_.ending_in = epoch;
  publish();
}

void NodeMembership::set_program_port(std::uint16_t port) {
  const Lock lock(mutex_);
  details_.program_port = port;
  publish();
}

void NodeMembership::add_failure(const FailureNote& note) {
  const Lock lock(mutex_);
  details_.failures.push_back(note);
  if (details_.failures.size() > kFailuresTold) details_.failures.erase(details_.failures.begin());
  publish();
}

void NodeMembership::forget_unconfirmed() {
  const Lock lock(mutex_);
  drop_unconfirmed();
}

/// Under the lock.
void NodeMembership::drop_unconfirmed() {
  unconfirmed_.clear();
  confirmed_.notify_all();
}

bool NodeMembership::all_confirmed() const {
  const Lock lock(mutex_);
  return over_ || (place_.hold() && unconfirmed_.empty());
}

// Repeats each report until the service confirms it: an answer may be lost, and a service may be
// away for a time.
void NodeMembership::tell_all() {
  const Interruption::InterruptionBinding binding(closing_);
  Duration pause{0};
  Lock lock(mutex_);
  while (!stop_) {
    const bool rejoins = !place_.hold() && !over_;
    auto lost = place_.take_lost();
    if (!lost && !rejoins && unconfirmed_.empty() && !proposed_) {
      work_.wait(lock);
      continue;
    }
    Status said;
    // Given back before the place is taken again: with a wanted slot both holds have one name.
    if (lost) {
      lock.unlock();
      lost.reset();
      lock.lock();
    }
    if (rejoins && !stop_) said = take_place_again(lock);
    if (said && !unconfirmed_.empty() && place_.hold() && !stop_) said = tell_report(lock);
    // Not behind a report that etcd, out of space, does not take.
    if (proposed_ && place_.hold() && !stop_) {
      if (Status proposed = tell_epoch(lock); !proposed) said = proposed;
    }
    if (said) {
      pause = Duration(0);
      continue;
    }
    pause = std::clamp<Duration>(2 * pause, kFirstPause, kLongestPause);
    work_.wait_for(lock, pause, [this] { return stop_.load(); });
  }
}

/// Releases the lock while it logs: the reader of standard error may be slow.
void NodeMembership::note_trouble(Lock& lock, const std::string& what, const Status& status) {
  if (stop_ || status.message() == trouble_) return;
  trouble_ = status.message();
  lock.unlock();
  log(LogLevel::warning, what + " has not reached " + options_.place +
                             ", and is told again until it has: " + status.message());
  lock.lock();
}

Status NodeMembership::take_place(Lock& lock) {
  const std::string name = next_name(), record = membership::encode(report_),
                    incarnation = report_.incarnation;
  lock.unlock();
  auto hold = membership_->hold(name, record, options_.ttl);
  bool own = false;
  Status status = hold ? Status()
                  : hold.status().code() == Code::refused
                      ? describe_holder(hold.status(), name, own)
                      : hold.status();
  lock.lock();
  // Its own earlier hold ends within its time.
  if (own) return Status(Code::timed_out, status.message());
  if (!status) return status;
  if (report_.incarnation != incarnation) {  // this hold speaks of workers that were given up
    place_.give_back(std::move(*hold));
    return Status(Code::timed_out, "the answer came too late");
  }
  name_ = name;
  place_.take(std::move(*hold));
  drop_unconfirmed();
  if (membership::encode(report_) != record) publish();
  return {};
}

Status NodeMembership::take_place_again(Lock& lock) {
  Status taken = take_place(lock);
  if (taken || stop_) return taken;
  const bool may_try_again =
      taken.code() != Code::refused && taken.code() != Code::invalid_argument;
  const Duration patience = std::max(options_.epochs.join_timeout, options_.out_limit);
  if (may_try_again && steady_clock().now() - place_.out_since() < patience) {
    note_trouble(lock, "that this node asks for a place in the job again", taken);
    return taken;
  }
  lock.unlock();
  end_of_job({false, 1, "this node's place in the job is lost: " + taken.message()}, true);
  give({LauncherEvent(OthersGone{}), {}, {}});
  watch_->close();
  lock.lock();
  return {};
}

/// `own`: the holder is this process.
Status NodeMembership::describe_holder(const Status& refused, const std::string& name,
                                       bool& own) const {
  std::string holder = "another launcher";
  if (auto watch = membership_->watch(name); watch) {
    const auto update = (*watch)->next(options_.ttl);
    for (const membership::Change& change :
         update ? update->changes : std::vector<membership::Change>()) {
      if (change.name != name || !change.value) continue;
      const auto report = membership::decode_report(*change.value);
      const auto details = report ? decode_node_details(report->details) : report.status();
      if (!details) continue;
      holder = details->launcher;
      own = details->identity == details_.identity;
    }
  }
  if (options_.wanted_slot < 0) return refused;
  return Status(Code::invalid_argument,
                "node rank " + std::to_string(options_.wanted_slot) + " is taken already, by " +
                    holder +
                    "; every node of the job needs a --node-rank of its own (and every job a "
                    "--rdzv-id of its own)");
}

Status NodeMembership::tell_report(Lock& lock) {
  const std::string record = unconfirmed_.front();
  const auto hold = place_.hold();
  lock.unlock();
  Status said = hold->set(record);
  lock.lock();
  if (said) {
    trouble_.clear();
    // Meanwhile the reports may have been dropped, and others have come.
    if (!unconfirmed_.empty() && hold == place_.hold() && unconfirmed_.front() == record)
      unconfirmed_.pop_front();
    if (unconfirmed_.empty()) {
      give_under_lock({});
      confirmed_.notify_all();
    }
    return {};
  }
  // The other thread takes care of a lost place.
  if (said.code() != Code::refused) note_trouble(lock, "what this node says of itself", said);
  return said;
}

Status NodeMembership::tell_epoch(Lock& lock) {
  const ProposedEpoch proposed = *proposed_;
  lock.unlock();
  const auto committed = membership_->commit(proposed.epoch, proposed.on_top_of);
  lock.lock();
  // Refused: another node committed first, and the watch will report its epoch.
  if (committed || committed.status().code() == Code::refused) {
    answered_ = proposed.on_top_of;
    answered_at_ = steady_clock().now();
    if (proposed_ && proposed_->on_top_of == answered_) proposed_.reset();
    return {};
  }
  note_trouble(lock, "epoch " + std::to_string(proposed.epoch.number) + " of the job",
               committed.status());
  return committed.status();
}

}  // namespace muster::launch
