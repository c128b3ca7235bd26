// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/membership/job_view.h"

#include <algorithm>
#include <span>

namespace muster::membership {
namespace {

/// The node leaves because its program is not there or may not be run, in a shell's exit codes.
bool cannot_start(const NodeReport& report) {
  return report.phase == NodePhase::leaving && (report.exit_code == 126 || report.exit_code == 127);
}

constexpr std::size_t kTroublesKept = 16;   // limit: memory for a host
constexpr std::size_t kKeepersKept = 16;    // limit: memory for nodes that fell silent
constexpr std::size_t kBlamedKept = 512;    // limit: 24 bytes each of an epoch's record
constexpr std::size_t kLeftOutKept = 128;   // limit: some 40 bytes each of an epoch's record
constexpr std::size_t kTroublesTold = 128;  // limit: a host's name and 12 bytes each of the record
// A record takes time to be read, and this node may see a trouble later than the one that tells it.
constexpr Duration kSameTrouble = std::chrono::seconds(10);  // limit: of a service that is slow

bool is_done(NodePhase phase) {
  return phase == NodePhase::leaving || phase == NodePhase::finished;
}

Duration ago(TimePoint at, TimePoint now) { return std::max(now - at, Duration(0)); }

template <class T>
std::span<const T> newest(const std::vector<T>& all, std::size_t most) {
  return std::span(all).last(std::min(all.size(), most));
}

/// All troubles of a host, of which an epoch tells some and this node knows some.
std::deque<TimePoint> merged(const std::deque<TimePoint>& known,
                             const std::deque<TimePoint>& told) {
  std::deque<TimePoint> all;
  auto one = known.begin();
  for (const TimePoint each : told) {
    while (one != known.end() && *one + kSameTrouble < each) all.push_back(*one++);
    const bool is_known = one != known.end() && *one <= each + kSameTrouble;
    all.push_back(is_known ? *one++ : each);
  }
  all.insert(all.end(), one, known.end());
  std::ranges::sort(all);
  while (all.size() > kTroublesKept) all.pop_front();
  return all;
}

std::string leave_reason_of(const NodeReport& report) {
  return report.phase == NodePhase::leaving ? report.reason : std::string();
}

/// A node's words from before it got its seat are of workers that it has no more.
bool has_state(const NodeReport& report, std::int64_t joined) {
  return report.state_in > 0 && report.state_in >= joined;
}

/// The epoch of which it says that its workers' state is gone; 0: none.
std::int64_t none_in(const NodeReport& report, std::int64_t joined) {
  return report.state_in == 0 && report.none_in >= joined ? report.none_in : 0;
}

/// Whether a part that was made in `epoch` is gone, as its node says.
bool is_part_gone(const JobView::Seat& seat, std::int64_t epoch) {
  return seat.none_in > 0 && seat.none_in >= epoch;
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
  forget_silent_keeper(node.report.incarnation);
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
  if (node.slot >= 0) return lose(node.slot, how, now);
  forget_silent_keeper(node.report.incarnation);
  const NodeReport& report = node.report;
  if (how == Absence::fell_silent)
    note_silent_keeper({report.incarnation, report.host, report.kept_in, now});
}

void JobView::note_silent_keeper(SilentKeeper node) {
  if (node.kept_in == 0 || node.incarnation.empty()) return;
  for (const auto& [name, other] : nodes_)
    if (other.report.incarnation == node.incarnation) return;  // it has another hold
  silent_keepers_.push_back(std::move(node));
  if (silent_keepers_.size() > kKeepersKept) silent_keepers_.pop_front();
}

void JobView::forget_silent_keeper(const std::string& incarnation) {
  std::erase_if(silent_keepers_,
                [&](const SilentKeeper& each) { return each.incarnation == incarnation; });
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
  seat.none_in = none_in(report, seat.joined);
  const bool had_told = std::exchange(seat.told_in, report.state_in) > 0;
  const bool tells_none = had_told || is_part_gone(seat, epoch_.number);
  if ((had_told && report.state_in == 0) || is_part_gone(seat, seat.part_in)) seat.part_in = 0;
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
    if (is_part_gone(seat, epoch_.number)) continue;
    seat.part_in = epoch_.number;
    set_has_state(seat, true);
  }
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

/// A death, or a worker that failed, is behind the failure of a group if there is one: that tells
/// nothing of links.
void JobView::record_failures(Epoch& next, TimePoint now) const {
  std::map<int, std::string> stays;  // by slot
  std::set<std::string> members;
  for (const Member& member : next.members) {
    const auto report = decode_report(member.value);
    if (!report) continue;
    stays[member.slot] = report->incarnation;
    members.insert(report->incarnation);
  }
  // A slot's next node does not inherit what was said of the one before.
  const auto is_same = [&](int slot) {
    const auto seat = seats_.find(slot);
    const auto next_one = stays.find(slot);
    return slot < 0 || (seat != seats_.end() && next_one != stays.end() &&
                        next_one->second == seat->second.incarnation);
  };
  std::vector<EarlierBlame> blames = blamed_before_;
  auto left_out = left_out_;
  if (!group_troubles_.empty() && lost_.empty() && failures_.empty()) {
    std::map<int, std::vector<int>> blamed;
    for (const auto& [slot, trouble] : group_troubles_) blamed[slot] = trouble.blamed;
    for (const SlotPair& pair : all_blamed_pairs(blamed)) {
      std::erase_if(blames, [&](const EarlierBlame& earlier) { return earlier.pair == pair; });
      blames.push_back({pair, now, committed()});
    }
    for (const auto& [slot, seat] : seats_) {
      const std::string& incarnation = seat.incarnation;
      if (!seat.present || members.contains(incarnation)) continue;
      std::erase_if(left_out, [&](const auto& each) { return each.first == incarnation; });
      left_out.emplace_back(incarnation, now);
    }
  }
  std::erase_if(blames, [&](const EarlierBlame& earlier) {
    return !is_same(earlier.pair.first) || !is_same(earlier.pair.second);
  });
  for (const auto& [pair, at, commits] : newest(blames, kBlamedKept))
    next.blames.push_back({pair.first, pair.second, commits, ago(at, now)});
  for (const auto& [incarnation, at] : newest(left_out, kLeftOutKept))
    next.left_out.push_back({incarnation, ago(at, now)});
}

void JobView::record_past(Epoch& next, TimePoint now, TimePoint troubles_since) const {
  record_failures(next, now);
  std::vector<std::pair<TimePoint, std::string>> troubles;
  for (const auto& [host, times] : troubles_)
    for (const TimePoint at : times)
      if (at >= troubles_since) troubles.emplace_back(at, host);
  std::ranges::sort(troubles);
  for (const auto& [at, host] : newest(troubles, kTroublesTold))
    next.troubles.push_back({host, ago(at, now)});
  record_state(next);
}

void JobView::record_state(Epoch& next) const {
  next.committed = commits_;
  next.lost_in = lost_in_;
  next.state_in = state_in_;
  for (const auto& [slot, seat] : seats_)
    if (!seat.present && !seat.heard) next.state_in = epoch_.number;
  next.state_divided = state_divided_;
  if (!state_divided_) return;
  std::set<std::string> members;
  for (const Member& member : next.members)
    if (const auto report = decode_report(member.value)) members.insert(report->incarnation);
  // Parts from before the job began anew are none.
  const bool is_new = state_made_ || lost_in_ >= epoch_.number;
  next.parts_gone = is_new ? 0 : epoch_.parts_gone;
  for (const auto& [slot, seat] : seats_)
    if (seat.has_state ? !members.contains(seat.incarnation) : is_part_gone(seat, epoch_.number))
      ++next.parts_gone;
}

void JobView::recall_past(const Epoch& epoch, TimePoint now) {
  blamed_before_.clear();
  left_out_.clear();
  for (const RecordedBlame& blame : epoch.blames)
    blamed_before_.push_back({{blame.one, blame.other}, now - blame.ago, blame.committed});
  for (const RecordedAbsence& absence : epoch.left_out)
    left_out_.emplace_back(absence.incarnation, now - absence.ago);
  std::unordered_map<std::string, std::deque<TimePoint>> told;
  for (const RecordedTrouble& trouble : epoch.troubles)
    told[trouble.host].push_back(now - trouble.ago);
  for (const auto& [host, times] : told) {
    auto& known = troubles_[host];
    known = merged(known, times);
  }
  const bool is_known = epoch.lost_in >= lost_in_;
  commits_ = is_known ? epoch.committed : 0;
  lost_in_ = std::max(lost_in_, epoch.lost_in);
  state_in_ = std::max(state_in_, epoch.state_in);
}

std::int64_t JobView::committed() const {
  std::int64_t newest = 0;
  for (const auto& [slot, trouble] : group_troubles_) newest = std::max(newest, trouble.committed);
  return newest;
}

std::optional<TimePoint> JobView::left_out_at(const NodeReport& report) const {
  const auto found =
      std::ranges::find(left_out_, report.incarnation, [](const auto& each) { return each.first; });
  if (found == left_out_.end()) return std::nullopt;
  return found->second;
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
  for (const auto& [slot, seat] : seats_)
    if (!seat.present && seat.silent)
      note_silent_keeper({seat.incarnation, seat.host, seat.kept_in, seat.lost_at});
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
    if (state_divided_ && seat.joined <= epoch.state_in && !is_part_gone(seat, epoch.state_in))
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
