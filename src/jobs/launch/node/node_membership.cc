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
#include "jobs/launch/node/job_identity.h"

namespace muster::launch {
namespace {

using membership::JobState;
using membership::NodePhase;

constexpr std::size_t kFailuresTold = 8;
// limit: without a lease; a service that has another way back tells by its watch
constexpr Duration kLongestWait = std::chrono::seconds(5);
// Before something is told again.
constexpr Duration kFirstPause = std::chrono::milliseconds(100);  // limit: pace of attempts
constexpr Duration kLongestPause = std::chrono::seconds(2);
// So late no thread is that runs: this process stood still, and the watch has not told yet what
// happened meanwhile.
constexpr Duration kStoodStill =
    std::chrono::milliseconds(500);  // limit: so late no thread is that runs
constexpr Duration kTimeToCatchUp = std::chrono::seconds(1);
constexpr int kLooksInTtl = 8;  // limit: pace of a node that waits for its place
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
  const bool news = counts(note.epoch) != counts(report_.state_in) ||
                    (counts(note.epoch) && note.divided != report_.state_divided) ||
                    (is_first_ && note.divided && note.epoch != report_.state_in) ||
                    note.lost_in != report_.lost_in;
  report_.state_in = note.epoch;
  report_.state_divided = note.divided;
  report_.committed = note.committed;
  report_.lost_in = note.lost_in;
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

/// Replaces the proposed epoch after a new decision. None: there is nothing to propose any more.
void NodeMembership::propose(std::optional<ProposedEpoch> epoch) {
  const Lock lock(mutex_);
  // The watch is about to tell of the answer. If it does not, the question is put again.
  if (epoch && epoch->on_top_of == answered_) {
    const TimePoint again = answered_at_ + kLongestWait;
    ask_again_ = std::min(ask_again_, again);
    if (steady_clock().now() < again) return;
    answered_ = -1;
  }
  if (proposed_ == epoch || over_) return;
  proposed_ = std::move(epoch);
  work_.notify_all();
}

TimePoint NodeMembership::expires() const {
  const Lock lock(mutex_);
  if (over_) return deadline_after(steady_clock(), kLongestWait);
  if (!place_.is_out() && place_.hold()) return place_.hold()->expires();
  return deadline_after(steady_clock(), std::min(kLongestWait, options_.ttl / kLooksInTtl));
}

void NodeMembership::follow_all() {
  TimePoint looked_at = steady_clock().now();
  while (!stop_) {
    const TimePoint now = steady_clock().now();
    const TimePoint wake = std::max(now, std::min(expires(), ask_again_));
    auto update = watch_->next(wake - now);
    if (stop_) return;
    if (!update) {
      // After the end of the job the service may end at any time.
      if (!over_.exchange(true))
        end_of_job({false, 1, service_lost_text(update.status().message())}, true);
      return give({LauncherEvent(OthersGone{}), {}, {}});
    }
    const bool stood_still =
        now - looked_at > kStoodStill || steady_clock().now() - wake > kStoodStill;
    looked_at = steady_clock().now();
    if (!follow(*update, stood_still)) return;
  }
}

/// A node that is cut off cannot know whether the job fails with the service or has ended well.
std::string NodeMembership::service_lost_text(const std::string& why) const {
  const Lock lock(mutex_);
  return options_.place + " does not answer any more; whether the job goes on or has ended" +
         (seated_ ? "" : " without this node") + " is not known here: " + why;
}

/// Returns false if there is nothing more to follow.
bool NodeMembership::follow(const membership::Update& update, bool stood_still) {
  // First: an epoch that others have begun meanwhile may be far behind in the queue of updates.
  if (!over_) keep_place();
  note_others(update);
  view_.apply(update, steady_clock().now());
  if (!over_ && refuses_itself()) {
    give({LauncherEvent(OthersGone{}), {}, {}});
    return false;
  }
  follow_epoch();
  follow_arrivals();
  if (over_) {
    const auto& nodes = view_.nodes();
    const bool alone = nodes.empty() || (nodes.size() == 1 && nodes.contains(place()));
    if (alone) give({LauncherEvent(OthersGone{}), {}, {}});
    return !alone;
  }
  decide(stood_still);
  return true;
}

void NodeMembership::note_others(const membership::Update& update) {
  const std::string own = place();
  NodeNotice notice;
  for (const membership::Change& change : update.changes) {
    if (!change.value || change.name == own) continue;
    const auto report = membership::decode_report(*change.value);
    const auto details = report ? decode_node_details(report->details) : report.status();
    if (!details || details->identity == details_.identity) continue;
    // A node that takes its place again has another name, and has told of these failures before.
    std::int64_t& seen = failures_seen_[details->identity];
    for (const FailureNote& note : details->failures) {
      if (note.order <= seen) continue;
      seen = note.order;
      notice.failures.push_back(note);
    }
  }
  if (!notice.failures.empty()) give(std::move(notice));
}

/// Ends, without disturbing others, where this node was started for another job (`job_identity.h`).
bool NodeMembership::refuses_itself() {
  const auto own = view_.nodes().find(place());
  if (own == view_.nodes().end() || own->second.slot >= 0 || own->first == compared_) return false;
  compared_ = own->first;
  const auto why = why_another_job(view_, own->first, {options_.epochs, options_.job, details_});
  if (why) end_of_job({false, 1, *why}, false);
  return why.has_value();
}

void NodeMembership::follow_epoch() {
  const membership::Epoch& epoch = view_.epoch();
  if (epoch.number <= followed_ || over_) return;
  const bool first = followed_ == 0;
  followed_ = epoch.number;
  if (epoch.state != JobState::running) {
    const bool succeeded = epoch.state == JobState::succeeded;
    if (first && succeeded)
      return end_of_job({false, 1,
                         "the job \"" + options_.job +
                             "\" had ended already, and well; start another one with an --rdzv-id "
                             "of its own"},
                        false);
    return end_of_job({succeeded, epoch.exit_code, epoch.reason}, false);
  }
  OwnPlace own{.name = {}, .incarnation = {}, .workers = details_.facts.workers};
  {
    const Lock lock(mutex_);
    own.incarnation = report_.incarnation;
    own.name = name_;
  }
  auto made = plan_of(epoch, own);
  if (!made) return end_of_job({false, 1, made.status().message()}, false);
  const auto plan = std::make_shared<const EpochPlan>(std::move(*made));
  // An epoch between had no seat for this node, and has not been seen.
  const bool left_out = has_member(epoch_, own.incarnation) && plan->joined > epoch_.number;
  const bool only_joined = !first && only_adds_nodes(epoch_, epoch);
  epoch_ = epoch;
  {
    const Lock lock(mutex_);
    seated_ = plan->node >= 0;
    is_first_ = plan->node == 0;
    joined_ = plan->joined;
    // Without a seat its workers of the epoch before end, and so does the report of them. A node
    // that leaves or stops keeps its last word.
    const bool speaks = report_.phase != NodePhase::waiting && report_.phase < NodePhase::stopped;
    if (!seated_ && speaks) await_seat();
  }
  if (left_out) give({LauncherEvent(NewEpoch{epoch.number, false}), {}, {}});
  give({LauncherEvent(NewEpoch{epoch.number, plan->node >= 0, only_joined, plan->joined_later}),
        plan,
        {}});
}

void NodeMembership::follow_arrivals() {
  const std::int64_t number = view_.epoch().number;
  if (over_ || number == complete_ || view_.arrived() < view_.seats().size()) return;
  if (!view_.lost().empty()) return;  // the next epoch is about to begin
  complete_ = number;
  give({{}, {}, {}, number});
}

/// Notices that this node has lost its place or has it again. The workers stay meanwhile.
void NodeMembership::keep_place() {
  PlaceNews news;
  {
    const Lock lock(mutex_);
    news = place_.look(steady_clock().now(), has_workers());
    if (news.lost_hold) {
      drop_unconfirmed();
      work_.notify_all();
    }
    if (news.what == PlaceChange::gone) proposed_.reset();
    if (news.what == PlaceChange::given_up) give_workers_up();
  }
  if (news.what != PlaceChange::none)
    log(news.what == PlaceChange::back ? LogLevel::info : LogLevel::warning, news.text);
}

/// Under the lock. Workers that train: an end that is reached is told whenever that is possible.
bool NodeMembership::has_workers() const {
  const NodePhase phase = report_.phase;
  const bool trains =
      phase == NodePhase::waiting || phase == NodePhase::running || phase == NodePhase::failed;
  return seated_ && trains && report_.trained_in == 0;
}

/// Under the lock. The others cannot be told, so this node comes back as another one.
void NodeMembership::give_workers_up() {
  seated_ = false;
  drop_unconfirmed();
  report_.incarnation = random_name(kRandomBytes);
  await_seat();
  give_under_lock({LauncherEvent(NewEpoch{std::max<std::int64_t>(followed_, 1), false}), {}, {}});
  work_.notify_all();
}

/// Under the lock. This node has no workers, and asks for a seat.
void NodeMembership::await_seat() {
  report_.phase = NodePhase::waiting;
  report_.epoch = report_.trained_in = report_.state_in = 0;
  report_.killed = false;
  report_.reason.clear();
  publish();
}

void NodeMembership::note_wait(const membership::Decision& decision) {
  if (std::exchange(awaited_, decision.awaited) == decision.awaited || awaited_.empty()) return;
  NodeNotice notice;
  notice.waits_for_state = StateWait{view_.epoch().number, decision.awaited,
                                     decision.awaited_until - decision.at, decision.waits_for};
  give(std::move(notice));
}

void NodeMembership::decide(bool stood_still) {
  ask_again_ = TimePoint::max();
  if (!stood_still) pauses_.reset();
  if (stood_still && pauses_.excuse()) {
    ask_again_ = deadline_after(steady_clock(), kTimeToCatchUp);
    return;
  }
  std::string own_name;
  std::int64_t committed = 0;
  {
    const Lock lock(mutex_);
    if (!place_.hold() || place_.is_out()) return;
    // The others may have lost their places for the same reason, and come back as well.
    const TimePoint all_back = place_.returned_at() + std::min(options_.ttl, kLongestWait);
    if (place_.returned_at() != TimePoint{} && steady_clock().now() < all_back) {
      ask_again_ = all_back;
      return;
    }
    own_name = name_;
    const bool counts = report_.state_in > 0 && report_.state_in >= joined_;
    if (seated_ && counts && report_.state_in >= view_.lost_in()) committed = report_.committed;
  }
  // A node that stops sees to it that the job ends: there may be no member left to propose it.
  const auto own = view_.nodes().find(own_name);
  const bool stops = own != view_.nodes().end() && own->second.report.phase == NodePhase::stopped;
  const bool proposes = stops || view_.proposer() == own_name;
  // The others say as well what the job waits for, and decide nothing.
  if (!proposes && view_.lost().empty() && awaited_.empty()) return propose(std::nullopt);
  const membership::Decision decision =
      membership::next_epoch(steady_clock().now(), view_, options_.epochs);
  note_wait(decision);
  if (!proposes) return propose(std::nullopt);
  ask_again_ = decision.again;
  if (!decision.commit) return propose(std::nullopt);
  membership::Epoch epoch = membership::make_epoch(view_, decision);
  if (epoch.number == 1) epoch.launch = details_.identity;
  epoch.committed = std::max(epoch.committed, committed);
  propose(ProposedEpoch{std::move(epoch), view_.epoch_revision()});
}

}  // namespace muster::launch
