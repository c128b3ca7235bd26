// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/membership/job_view.h"

#include <algorithm>

namespace muster::membership {
namespace {

/// The node leaves because its program is not there or may not be run, in a shell's exit codes.
bool cannot_start(const NodeReport& report) {
  return report.phase == NodePhase::leaving && (report.exit_code == 126 || report.exit_code == 127);
}

bool is_done(NodePhase phase) {
  return phase == NodePhase::leaving || phase == NodePhase::finished;
}

std::string leave_reason_of(const NodeReport& report) {
  return report.phase == NodePhase::leaving ? report.reason : std::string();
}

/// A node's words from before it got its seat are of workers that it has no more.
bool has_state(const NodeReport& report, std::int64_t joined) {
  return report.state_in > 0 && report.state_in >= joined;
}

/// The epoch of which it says that its workers' state, or a part of it, is gone; 0: none.
std::int64_t none_in(const NodeReport& report, std::int64_t joined) {
  const bool says_so = report.state_in == 0 || report.state_divided;
  return says_so && report.none_in >= joined ? report.none_in : 0;
}

}  // namespace

std::size_t JobView::apply(const Update& update, TimePoint now) {
  if (began_ == TimePoint::max()) began_ = now;
  revision_ = update.revision;
  std::size_t looked_at = update.changes.size();
  if (update.snapshot) {
    std::set<std::string> named;
    for (const Change& change : update.changes) {
      if (change.value) named.insert(change.name);
    }
    std::vector<std::string> gone;
    for (const auto& [name, node] : nodes_) {
      if (!named.contains(name)) gone.push_back(name);
    }
    looked_at += nodes_.size();
    for (const std::string& name : gone) remove(name, Absence::fell_silent, now);
  }
  for (const Change& change : update.changes) apply(change, now);
  if (update.epoch && update.epoch->number > epoch_.number) {
    epoch_revision_ = update.epoch_revision;
    recall_past(*update.epoch, now);
    adopt(*update.epoch, !update.snapshot && update.epoch->number == epoch_.number + 1);
    looked_at += epoch_.members.size();
    lose_absent_members(now);
  }
  return looked_at;
}

/// Only once an epoch is known is it known whose seats these are.
void JobView::lose_absent_members(TimePoint now) {
  const auto ended = std::exchange(ended_, {});
  for (auto& [slot, seat] : seats_) {
    Node* holder = holder_of(seat);
    if (holder != nullptr) {
      judge(seat.name, *holder, now);
      continue;
    }
    const auto end = ended.find(seat.incarnation);
    if (end != ended.end()) seat.leave_reason = end->second.leave_reason;
    lose(slot, end == ended.end() ? Absence::fell_silent : end->second.how, now);
  }
}

void JobView::apply(const Change& change, TimePoint now) {
  const auto known = nodes_.find(change.name);
  if (!change.value) {
    if (known != nodes_.end())
      remove(change.name, change.silent ? Absence::fell_silent : Absence::died, now);
    return;
  }
  auto report = decode_report(*change.value);
  if (!report) {
    unreadable_ = change.name;
    if (known != nodes_.end()) remove(change.name, Absence::died, now);
    return;
  }
  // A launcher that gave its workers up has another incarnation, and is another node.
  const bool same = known != nodes_.end() && known->second.since == change.since &&
                    known->second.report.incarnation == report->incarnation;
  if (same) {
    known->second.report = std::move(*report);
    return judge(change.name, known->second, now);
  }
  // Another hold of the same name: the node that had it before is gone.
  if (known != nodes_.end()) remove(change.name, Absence::died, now);
  add(change.name, Node{change.since, std::move(*report), -1}, now);
}

void JobView::add(const std::string& name, Node node, TimePoint now) {
  ended_.erase(node.report.incarnation);
  node.may_keep = forget_silent_keeper(node.report.incarnation);
  Node& kept = nodes_.emplace(name, std::move(node)).first->second;
  waiting_.emplace(kept.since, name);
  last_arrival_ = now;
  if (const auto own = seat_of_.find(kept.report.incarnation); own != seat_of_.end()) {
    if (seats_.at(own->second).present)
      returning_[kept.report.incarnation] = name;
    else
      take_back(own->second, name);
  }
  judge(name, kept, now);
}

/// The node that has lost `slot` is there again with its workers, and no epoch has begun without
/// it: nothing was lost.
void JobView::take_back(int slot, const std::string& name) {
  Seat& seat = seats_.at(slot);
  Node& node = nodes_.at(name);
  // Failures are those of its workers, which are the same.
  if (failed_names_.erase(seat.name) > 0) {
    failed_names_.insert(name);
    for (Failure& failure : failures_)
      if (failure.name == seat.name) failure.name = name;
  }
  seat.name = name;
  seat.present = true;
  seat.leave_reason.clear();
  node.slot = slot;
  waiting_.erase({node.since, name});
  if (waiting_.empty()) last_arrival_ = TimePoint::max();
  present_.insert(slot);
  if (seat.has_state) ++state_holders_;
  vacant_.erase(slot);
  lost_.erase(slot);
  if (lost_.empty()) lost_since_ = TimePoint::max();
  if (auto& times = troubles_[seat.host]; std::exchange(seat.blamed, false) && !times.empty())
    times.pop_back();
}

/// Null: its name is free, or another launcher holds it by now.
JobView::Node* JobView::holder_of(const Seat& seat) {
  const auto node = nodes_.find(seat.name);
  if (node == nodes_.end() || node->second.report.incarnation != seat.incarnation) return nullptr;
  return &node->second;
}

bool JobView::is_seated(const NodeReport& report) const {
  const auto own = seat_of_.find(report.incarnation);
  return own != seat_of_.end() && seats_.at(own->second).present;
}

void JobView::remove(const std::string& name, Absence how, TimePoint now) {
  const auto entry = nodes_.find(name);
  const Node node = std::move(entry->second);
  nodes_.erase(entry);
  waiting_.erase({node.since, name});
  if (waiting_.empty()) last_arrival_ = TimePoint::max();
  const auto again = returning_.find(node.report.incarnation);
  if (again != returning_.end() && again->second == name) returning_.erase(again);
  if (is_done(node.report.phase)) how = Absence::left;
  // The last end counts: an earlier hold may have ended another way.
  if (how == Absence::fell_silent)
    ended_.erase(node.report.incarnation);
  else if (!node.report.incarnation.empty())
    ended_[node.report.incarnation] = {how, leave_reason_of(node.report)};
  if (node.slot >= 0) {
    // It may not have heard of its seat, and so has not told yet what it brings.
    Seat& seat = seats_.at(node.slot);
    if (how == Absence::fell_silent && node.report.epoch < seat.joined)
      seat.kept_in = std::max(seat.kept_in, node.offered_in());
    return lose(node.slot, how, now);
  }
  forget_silent_keeper(node.report.incarnation);
  const NodeReport& report = node.report;
  if (how == Absence::fell_silent)
    note_silent_keeper({report.incarnation, report.host, node.offered_in(), now});
}

// Compares a node's report with its seat.
void JobView::judge(const std::string& name, Node& node, TimePoint now) {
  const NodeReport& report = node.report;
  const auto fail = [&] {
    if (!failed_names_.insert(name).second) {
      // The one that was killed may be noticed second.
      for (Failure& known : failures_) known.killed |= known.name == name && report.killed;
      return;
    }
    trouble(report.host, now);
    failures_.push_back({name, report.phase, report.exit_code, report.reason, now, report.killed});
  };
  const bool of_this_epoch = node.slot >= 0 && report.epoch == epoch_.number;
  if (of_this_epoch) hear(seats_.at(node.slot), report);
  if (node.slot >= 0) hear_of_state(seats_.at(node.slot), report);
  if (is_done(report.phase)) {
    waiting_.erase({node.since, name});
    // A launcher that is started on such a host again and again must not disturb the job each time.
    if (node.slot >= 0 && cannot_start(report)) trouble(report.host, now);
    if (node.slot < 0) return;
    seats_.at(node.slot).leave_reason = leave_reason_of(report);
    lose(node.slot, Absence::left, now);
    return;
  }
  if (report.phase == NodePhase::stopped) return fail();
  if (node.slot >= 0 && report.troubled_in == epoch_.number) {
    if (group_troubles_.empty()) troubled_since_ = now;
    group_troubles_[node.slot] = {
        {report.blamed.begin(), report.blamed.end()}, report.trouble, report.committed};
  }
  if (node.slot >= 0 && report.ending_in == epoch_.number) has_ending_worker_ = true;
  if (of_this_epoch && report.phase == NodePhase::failed) fail();
}

void JobView::hear(Seat& seat, const NodeReport& report) {
  const NodePhase phase = report.phase;
  if (!seat.arrived) ++arrived_;
  seat.arrived = true;
  trained_in_ = std::max(trained_in_, report.trained_in);
  if (seat.succeeded || (phase != NodePhase::succeeded && phase != NodePhase::finished)) return;
  seat.succeeded = true;
  ++succeeded_;
}

/// Once the state is lost, commits that were made before are none any more, also if that is heard
/// of in a later epoch, whose members were named before. Commits count that workers here had in
/// memory: a node that joins again may speak of those from before the others began anew.
void JobView::hear_of_state(Seat& seat, const NodeReport& report) {
  seat.heard = true;
  seat.kept_in = report.kept_in;
  seat.none_in = std::max(seat.none_in, none_in(report, seat.joined));
  const std::int64_t told_in = std::exchange(seat.told_in, report.state_in);
  const bool had_told = told_in > 0;
  // Also without a word of the epoch: what it had told of is gone, and counts in no later one.
  if (had_told && report.state_in == 0) seat.none_in = std::max(seat.none_in, told_in);
  const bool tells_none = had_told || seat.is_part_gone(epoch_.number);
  if ((had_told && report.state_in == 0) || seat.is_part_gone(seat.part_in)) seat.part_in = 0;
  seat.told_none = report.state_in == 0 && (tells_none || seat.told_none);
  if (seat.present) set_has_state(seat, has_state(report, seat.joined) || has_part(seat));
  note_state_made(report.state_in == epoch_.number, seat.has_state && report.state_divided);
  if (report.lost_in > lost_in_) {
    lost_in_ = report.lost_in;
    commits_ = 0;
    lose_old_parts();
  }
  if (has_state(report, seat.joined)) seat.had_state_in = report.state_in;
  state_in_ = std::max(state_in_, seat.had_state_in);
  if (seat.had_state_in > 0 && seat.had_state_in >= lost_in_)
    commits_ = std::max(commits_, report.committed);
}

void JobView::hear_own_state(std::int64_t epoch, bool divided) {
  if (epoch == 0 || epoch != epoch_.number) return;
  note_state_made(true, divided);
  state_in_ = std::max(state_in_, epoch);
}

/// A commit of a divided state leaves a part with each member: one that has not said so yet may
/// fall silent with it.
void JobView::note_state_made(bool made, bool divided) {
  const bool had_parts = state_divided_ && state_made_;
  state_divided_ |= divided;
  state_made_ |= made;
  if (had_parts || !state_divided_ || !state_made_) return;
  for (auto& [slot, seat] : seats_) {
    if (seat.is_part_gone(epoch_.number)) continue;
    seat.part_in = epoch_.number;
    set_has_state(seat, true);
  }
}

/// A member has told that its workers, or some, have ended with their parts in this epoch.
bool JobView::has_lost_a_part() const {
  return std::ranges::any_of(
      seats_, [this](const auto& each) { return each.second.is_part_gone(epoch_.number); });
}

/// The job has begun anew.
void JobView::lose_old_parts() {
  for (auto& [slot, seat] : seats_) {
    if (seat.part_in == 0 || seat.part_in >= lost_in_) continue;
    seat.part_in = 0;
    if (seat.had_state_in < lost_in_) set_has_state(seat, false);
  }
}

void JobView::set_has_state(Seat& seat, bool has) {
  if (seat.present && seat.has_state) --state_holders_;
  seat.has_state = has;
  if (seat.present && seat.has_state) ++state_holders_;
}

void JobView::lose(int slot, Absence how, TimePoint now) {
  Seat& seat = seats_.at(slot);
  if (!seat.present) return;
  if (seat.has_state) --state_holders_;
  seat.present = false;
  present_.erase(slot);
  vacant_.insert(slot);
  if (!seat.succeeded) {
    const bool was_blamed = std::exchange(seat.blamed, how != Absence::left);
    seat.silent = how == Absence::fell_silent;
    seat.lost_at = now;
    if (seat.blamed && !was_blamed) trouble(seat.host, now);
    lost_.insert(slot);
    if (lost_since_ == TimePoint::max()) lost_since_ = now;
  }
  if (const auto again = returning_.find(seat.incarnation); again != returning_.end()) {
    const std::string name = returning_.extract(again).mapped();
    take_back(slot, name);
    judge(name, nodes_.at(name), now);
  }
}

void JobView::trouble(const std::string& host, TimePoint now) {
  auto& times = troubles_[host];
  times.push_back(now);
  if (times.size() > kTroublesKept) times.pop_front();
}

/// `before`: the seats of the epoch before, by incarnation.
JobView::Seat JobView::next_seat(const Member& member,
                                 const std::unordered_map<std::string, Seat>& before) {
  Seat seat{.name = member.name, .value = member.value, .joined = member.joined};
  const auto report = decode_report(member.value);
  if (!report) return seat;
  seat.host = report->host;
  seat.incarnation = report->incarnation;
  seat.kept_in = report->kept_in;
  seat.none_in = none_in(*report, member.joined);
  if (has_state(*report, member.joined)) seat.had_state_in = report->state_in;
  const auto same = before.find(seat.incarnation);
  const bool stays = same != before.end() && same->second.joined == member.joined;
  seat.has_state = seat.had_state_in > 0 || (stays && same->second.has_state);
  if (stays) seat.told_in = same->second.told_in;
  if (stays) seat.part_in = same->second.part_in;
  if (stays) seat.none_in = std::max(seat.none_in, same->second.none_in);
  state_divided_ |= seat.part_in > 0 || (seat.has_state && report->state_divided);
  // It may be lost already: that counts once against its host.
  seat.blamed = stays && same->second.blamed;
  return seat;
}

/// `was_watched`: this node has heard all that was said during the epoch before, so it knows also
/// of members that are gone by now what they had.
void JobView::adopt(const Epoch& epoch, bool was_watched) {
  std::unordered_map<std::string, Seat> before;
  for (const auto& [slot, seat] : seats_)
    if (!seat.incarnation.empty()) before.emplace(seat.incarnation, seat);
  for (const auto& [slot, seat] : seats_) {
    const auto node = nodes_.find(seat.name);
    if (node == nodes_.end()) continue;
    node->second.slot = -1;
    if (!is_done(node->second.report.phase)) waiting_.emplace(node->second.since, seat.name);
  }
  note_silent_members();
  epoch_ = epoch;
  seats_.clear();
  seat_of_.clear();
  returning_.clear();
  present_.clear();
  lost_.clear();
  vacant_.clear();
  gaps_.clear();
  std::erase_if(failures_, [&](const Failure& failure) {
    return failure.phase == NodePhase::failed && failed_names_.erase(failure.name) > 0;
  });
  succeeded_ = arrived_ = state_holders_ = 0;
  trained_in_ = 0;
  state_divided_ = epoch.state_divided;
  state_made_ = false;
  lost_since_ = troubled_since_ = TimePoint::max();
  group_troubles_.clear();
  has_ending_worker_ = false;
  int next = 0;
  for (const Member& member : epoch.members) {
    for (; next < member.slot; ++next) gaps_.insert(next);
    next = member.slot + 1;
    Seat seat = next_seat(member, before);
    seat.heard = was_watched;
    if (!seat.incarnation.empty()) seat_of_.emplace(seat.incarnation, member.slot);
    Node* holder = holder_of(seat);
    if (seat.has_state) ++state_holders_;
    seats_.emplace(member.slot, std::move(seat));
    present_.insert(member.slot);
    if (holder == nullptr) continue;
    holder->slot = member.slot;
    waiting_.erase({holder->since, member.name});
  }
  // The node that decided it knew of parts that members had not told of.
  for (auto& [slot, seat] : seats_) {
    if (state_divided_ && seat.joined <= epoch.state_in && !seat.is_part_gone(epoch.state_in))
      seat.part_in = std::max(seat.part_in, epoch.state_in);
    if (has_part(seat)) set_has_state(seat, true);
  }
  // While the epoch was committed a member may have taken its place again under another name.
  for (const auto& [since, name] : waiting_) {
    const std::string& incarnation = nodes_.at(name).report.incarnation;
    if (seat_of_.contains(incarnation)) returning_[incarnation] = name;
  }
  if (waiting_.empty()) last_arrival_ = TimePoint::max();
}

const std::deque<TimePoint>* JobView::troubles_of(const std::string& host) const {
  const auto entry = troubles_.find(host);
  return entry == troubles_.end() ? nullptr : &entry->second;
}

std::string JobView::proposer() const {
  if (!present_.empty()) return seats_.at(*present_.begin()).name;
  return waiting_.empty() ? std::string() : waiting_.begin()->second;
}

}  // namespace muster::membership
