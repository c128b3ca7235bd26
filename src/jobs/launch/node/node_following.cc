// SPDX-License-Identifier: BSD-3-Clause
// The thread of a NodeMembership that follows the watch, and decides.
#include <algorithm>
#include <utility>

#include "core/base/log/log.h"
#include "core/security/secret.h"
#include "jobs/launch/node/job_identity.h"
#include "jobs/launch/node/node_membership.h"

namespace muster::launch {
namespace {

using membership::JobState;
using membership::NodePhase;

// limit: without a lease; a service that has another way back tells by its watch
constexpr Duration kLongestWait = std::chrono::seconds(5);
// So late no thread is that runs: this process stood still, and the watch has not told yet what
// happened meanwhile.
constexpr Duration kStoodStill =
    std::chrono::milliseconds(500);  // limit: so late no thread is that runs
constexpr Duration kTimeToCatchUp = std::chrono::seconds(1);
constexpr int kLooksInTtl = 8;  // limit: pace of a node that waits for the service
constexpr std::size_t kNameBytes = 8;

}  // namespace

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
  // Its return is told at the same level: a reader of the warning waits for that.
  if (news.what != PlaceChange::none) log(LogLevel::warning, news.text);
  if (!news.cause.empty()) log(LogLevel::info, "the place was lost because: " + news.cause);
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
  report_.incarnation = random_name(kNameBytes);
  await_seat();
  give_under_lock({LauncherEvent(NewEpoch{std::max<std::int64_t>(followed_, 1), false}), {}, {}});
  work_.notify_all();
}

/// Under the lock. This node has no workers, and asks for a seat.
void NodeMembership::await_seat() {
  report_.phase = NodePhase::waiting;
  report_.epoch = report_.trained_in = report_.state_in = report_.none_in = 0;
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
  TimePoint returning{};
  std::int64_t committed = 0, state_in = 0;
  bool divided = false;
  {
    const Lock lock(mutex_);
    if (!place_.hold() || place_.is_out()) return;
    // The others may have lost their places for the same reason, and come back as well.
    returning = place_.others_return_until(
        steady_clock().now(), std::min(options_.ttl, kLongestWait), options_.ttl / kLooksInTtl);
    own_name = name_;
    state_in = report_.state_in;
    divided = report_.state_divided;
    const bool counts = report_.state_in > 0 && report_.state_in >= joined_;
    if (seated_ && counts && report_.state_in >= view_.lost_in()) committed = report_.committed;
  }
  view_.hear_own_state(state_in, divided);
  // A node that stops sees to it that the job ends: there may be no member left to propose it.
  const auto own = view_.nodes().find(own_name);
  const bool stops = own != view_.nodes().end() && own->second.report.phase == NodePhase::stopped;
  const bool proposes = stops || view_.proposer() == own_name;
  // The others say as well what the job waits for, and decide nothing.
  if (!proposes && view_.lost().empty() && awaited_.empty()) return propose(std::nullopt);
  const membership::Decision decision =
      membership::next_epoch(steady_clock().now(), view_, options_.epochs, returning);
  note_wait(decision);
  ask_again_ = decision.again;
  if (!proposes || !decision.commit) return propose(std::nullopt);
  membership::Epoch epoch = membership::make_epoch(view_, decision);
  if (epoch.number == 1) epoch.launch = details_.identity;
  epoch.committed = std::max(epoch.committed, committed);
  propose(ProposedEpoch{std::move(epoch), view_.epoch_revision()});
}

}  // namespace muster::launch
