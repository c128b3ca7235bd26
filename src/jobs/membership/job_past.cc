// SPDX-License-Identifier: BSD-3-Clause
// Earlier epochs as the present one's record tells of them: failures, and who may have commits.
#include <algorithm>
#include <span>
#include <vector>

#include "jobs/membership/job_view.h"

namespace muster::membership {
namespace {

constexpr std::size_t kKeepersKept = 16;    // limit: memory for nodes that fell silent
constexpr std::size_t kBlamedKept = 512;    // limit: 24 bytes each of an epoch's record
constexpr std::size_t kLeftOutKept = 128;   // limit: some 40 bytes each of an epoch's record
constexpr std::size_t kTroublesTold = 128;  // limit: a host's name and 12 bytes each of the record
// A record takes time to be read, and this node may see a trouble later than the one that tells it.
constexpr Duration kSameTrouble = std::chrono::seconds(10);  // limit: of a service that is slow

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
  while (all.size() > JobView::kTroublesKept) all.pop_front();
  return all;
}

}  // namespace

/// The newest epoch of whose commits a member may have one; 0: none. An epoch gives the state to
/// all its members or to none, also to one that has not told so yet.
std::int64_t JobView::may_keep(const Seat& seat) const {
  const bool got_it = seat.joined <= state_in_ && !seat.is_part_gone(state_in_);
  const bool has_it = !seat.told_none && (seat.has_state || got_it);
  return std::max(seat.kept_in, has_it ? state_in_ : 0);
}

/// Members of the epoch that is over. Those that have a seat in the next one come back to it.
void JobView::note_silent_members() {
  for (const auto& [slot, seat] : seats_)
    if (!seat.present && seat.silent)
      note_silent_keeper({seat.incarnation, seat.host, may_keep(seat), seat.lost_at});
}

void JobView::note_silent_keeper(SilentKeeper node) {
  if (node.kept_in == 0 || node.incarnation.empty()) return;
  forget_silent_keeper(node.incarnation);
  for (auto& [name, other] : nodes_) {
    if (other.report.incarnation != node.incarnation) continue;
    other.may_keep = std::max(other.may_keep, node.kept_in);  // it has another hold
    return;
  }
  silent_keepers_.push_back(std::move(node));
  if (silent_keepers_.size() > kKeepersKept) silent_keepers_.pop_front();
}

std::int64_t JobView::forget_silent_keeper(const std::string& incarnation) {
  std::int64_t kept_in = 0;
  std::erase_if(silent_keepers_, [&](const SilentKeeper& each) {
    const bool is_it = each.incarnation == incarnation;
    if (is_it) kept_in = std::max(kept_in, each.kept_in);
    return is_it;
  });
  return kept_in;
}

/// The knowledge of others counts until it has said what it keeps: a launcher takes a large commit
/// over from its workers for seconds, in which it has not told of it.
std::int64_t JobView::Node::offered_in() const {
  const std::int64_t told = std::max(report.kept_in, report.state_in);
  const bool knows = report.kept_in > 0 || report.none_in > 0;
  return knows ? told : std::max(told, may_keep);
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
  record_keepers(next, now);
}

/// Those that this epoch leaves out are the newest.
void JobView::record_keepers(Epoch& next, TimePoint now) const {
  std::vector<SilentKeeper> all(silent_keepers_.begin(), silent_keepers_.end());
  for (const auto& [slot, seat] : seats_)
    if (!seat.present && seat.silent)
      all.push_back({seat.incarnation, seat.host, may_keep(seat), seat.lost_at});
  std::erase_if(all, [this](const SilentKeeper& each) {
    return each.kept_in == 0 || each.incarnation.empty() || each.kept_in < lost_in_;
  });
  for (const SilentKeeper& each : newest(all, kKeepersKept))
    next.keepers.push_back({each.incarnation, each.host, each.kept_in, ago(each.since, now)});
}

/// Those whose return or end this node has not seen. It may have read of one long after the epoch
/// that told of it was decided; a later epoch says better since when that one has been silent.
void JobView::recall_keepers(const Epoch& epoch, TimePoint now) {
  for (const RecordedKeeper& told : epoch.keepers) {
    const TimePoint since = now - told.ago;
    const auto known =
        std::ranges::find(silent_keepers_, told.incarnation, &SilentKeeper::incarnation);
    if (known != silent_keepers_.end())
      known->since = std::min(known->since, since);
    else if (!ended_.contains(told.incarnation))
      note_silent_keeper({told.incarnation, told.host, told.kept_in, since});
  }
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
    if (seat.is_part_gone(epoch_.number) || (seat.has_state && !members.contains(seat.incarnation)))
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
  recall_keepers(epoch, now);
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

}  // namespace muster::membership
