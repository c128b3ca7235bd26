// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/membership/next_epoch.h"

#include <algorithm>

namespace muster::membership {
namespace {

constexpr const char* kNoState = "no node that is left has the job's state in memory";
constexpr const char* kOnlyParts =
    "the nodes that are left may have only parts of the job's state in memory";
constexpr const char* kTrainingIsOver = "; training had ended on all ranks and is not repeated";

std::string count(std::size_t number, const std::string& what) {
  return std::to_string(number) + " " + what + (number == 1 ? "" : "s");
}

/// Nothing, where no time was given to wait.
std::string within(Duration time) {
  return time > Duration(0) ? " within " + muster::describe(time) : std::string();
}

TimePoint later(TimePoint from, Duration by) {
  return by >= TimePoint::max() - from ? TimePoint::max() : from + by;
}

class Deciding {
 public:
  Deciding(TimePoint now, const JobView& view, const EpochOptions& options, TimePoint returning)
      : now_(now), returning_(returning), view_(view), options_(options) {}

  Decision run() {
    if (view_.epoch().state != JobState::running) return {};
    decision_.at = now_;
    if (options_.blacklist_after > 0) decision_.troubles_since = now_ - options_.blacklist_cooldown;
    if (!may_yet_be_a_loss() && !end_by_stop() && !end_of_training() && !end_by_failure() &&
        !end_by_success() && !waits_for_returning()) {
      if (view_.epoch().number == 0) {
        begin();
      } else {
        go_on();
      }
    }
    if (!decision_.commit) {
      decision_.vacated.clear();
      decision_.seated.clear();
      decision_.left_out.clear();
    }
    return std::move(decision_);
  }

 private:
  void end(JobState state, int exit_code, std::string reason) {
    decision_.commit = true;
    decision_.state = state;
    decision_.restarts = view_.epoch().restarts;
    decision_.exit_code = exit_code;
    decision_.reason = std::move(reason);
    decision_.vacated.clear();
    decision_.seated.clear();
  }

  void start(int restarts, std::string reason) {
    decision_.commit = true;
    decision_.restarts = restarts;
    decision_.reason = std::move(reason);
  }

  void ask_again(TimePoint at) { decision_.again = std::min(decision_.again, at); }

  /// A worker that fails beside a lost node has rather failed because of it.
  bool counts_as_restart() const { return !view_.failures().empty() && view_.lost().empty(); }

  bool may_yet_be_a_loss() {
    if (options_.failure_patience <= Duration(0) || !view_.lost().empty()) return false;
    TimePoint first = TimePoint::max();
    for (const JobView::Failure& failure : view_.failures()) {
      ++decision_.looked_at;
      if (failure.phase == NodePhase::stopped || failure.killed) return false;
      first = std::min(first, failure.since);
    }
    const TimePoint certain = later(first, options_.failure_patience);
    if (view_.failures().empty() || now_ >= certain) return false;
    ask_again(certain);
    return true;
  }

  /// The service was silent, and not yet for long again: who lost a place with that takes it again.
  /// A service that is always slow seems silent at each renewal, so each wait has its own end too.
  bool waits_for_returning() {
    if (now_ >= returning_) return false;
    decision_.looked_at += view_.lost().size();
    TimePoint until{};
    if (view_.epoch().number > 0) {
      for (const int slot : view_.lost()) {
        const JobView::Seat& seat = view_.seats().at(slot);
        if (seat.silent) until = std::max(until, later(seat.lost_at, options_.silence_patience));
      }
    } else if (view_.waiting().size() < static_cast<std::size_t>(options_.max_nodes)) {
      until = later(view_.began(), options_.join_timeout);
    }
    if (now_ >= until) return false;
    ask_again(std::min(until, returning_));
    return true;
  }

  bool end_by_stop() {
    for (const JobView::Failure& failure : view_.failures()) {
      ++decision_.looked_at;
      if (failure.phase != NodePhase::stopped) continue;
      end(JobState::failed, failure.exit_code, failure.reason);
      return true;
    }
    return false;
  }

  bool end_by_failure() {
    if (!counts_as_restart() || view_.epoch().restarts < options_.max_restarts) return false;
    end(JobState::failed, view_.failures().front().exit_code, view_.failures().front().reason);
    return true;
  }

  /// Training has ended: the job ends with those that had a part in it. True: nothing else counts.
  bool end_of_training() {
    if (view_.trained_in() == 0) return false;
    decision_.looked_at += view_.seats().size();
    const auto fail = [&](int exit_code, const std::string& why) {
      end(JobState::failed, exit_code, why + kTrainingIsOver);
      return true;
    };
    bool all_well = true;
    for (const auto& [slot, seat] : view_.seats()) {
      if (seat.joined > view_.trained_in() || seat.succeeded) continue;
      all_well = false;
      for (const JobView::Failure& failure : view_.failures())
        if (failure.name == seat.name) return fail(failure.exit_code, failure.reason);
      if (!view_.lost().contains(slot)) continue;
      const TimePoint given_up = later(seat.lost_at, options_.silence_patience);
      if (seat.silent && now_ < given_up)
        ask_again(given_up);
      else
        return fail(1, describe_loss_of(slot));
    }
    if (all_well) end(JobState::succeeded, 0, "all workers have ended well");
    return true;
  }

  bool end_by_success() {
    if (view_.epoch().number == 0 || view_.succeeded() < view_.seats().size()) return false;
    if (view_.seats().empty()) return false;
    end(JobState::succeeded, 0, "all workers have ended well");
    return true;
  }

  /// Until when a host's nodes are passed over; nothing: they are welcome.
  std::optional<TimePoint> barred_until(const std::string& host) const {
    const auto* times = options_.blacklist_after > 0 ? view_.troubles_of(host) : nullptr;
    const auto after = static_cast<std::size_t>(options_.blacklist_after);
    if (times == nullptr || times->size() < after) return std::nullopt;
    const TimePoint until = later((*times)[times->size() - after], options_.blacklist_cooldown);
    return until > now_ ? std::optional(until) : std::nullopt;
  }

  /// Until when a node that was left out of an epoch is not seated again.
  std::optional<TimePoint> left_out_until(const NodeReport& report) const {
    const auto since = view_.left_out_at(report);
    if (!since) return std::nullopt;
    const TimePoint until = later(*since, options_.failures.window);
    return until > now_ ? std::optional(until) : std::nullopt;
  }

  bool is_left_out(int slot) const { return std::ranges::count(decision_.left_out, slot) > 0; }

  bool is_free(int slot) const {
    if (taken_.contains(slot)) return false;
    if (is_left_out(slot)) return true;
    return slot > highest_ || view_.vacant().contains(slot) || view_.gaps().contains(slot);
  }

  /// The slot that a node shall have: the one that it wants, that its host had, or the lowest.
  std::optional<int> slot_for(const NodeReport& report) {
    if (report.wanted_slot >= 0)
      return is_free(report.wanted_slot) ? std::optional(report.wanted_slot) : std::nullopt;
    for (auto [at, end] = vacant_of_host_.equal_range(report.host); at != end; ++at) {
      ++decision_.looked_at;
      if (is_free(at->second)) return at->second;
    }
    while (lowest_vacant_ != view_.vacant().end() && !is_free(*lowest_vacant_)) ++lowest_vacant_;
    if (lowest_vacant_ != view_.vacant().end()) return *lowest_vacant_;
    for (const int slot : decision_.left_out)
      if (is_free(slot)) return slot;
    while (lowest_gap_ != view_.gaps().end() && !is_free(*lowest_gap_)) ++lowest_gap_;
    if (lowest_gap_ != view_.gaps().end()) return *lowest_gap_;
    while (!is_free(next_)) ++next_;
    return next_;
  }

  /// A node that was started with other numbers or another program refuses itself
  /// (`NodeMembership`). One that took
  /// its place again while its earlier hold lives gets that hold's seat.
  bool may_be_seated(const NodeReport& report) const {
    const bool of_this_job = report.most_nodes == 0 || (report.least_nodes == options_.min_nodes &&
                                                        report.most_nodes == options_.max_nodes);
    return of_this_job && is_same_program(report, options_) && !view_.is_seated(report);
  }

  /// Members that are there and are not left out.
  std::size_t going_on() const { return view_.seated() - decision_.left_out.size(); }

  /// Nodes that wait and could take the seat of any that is left out.
  std::size_t spares() {
    std::set<std::string_view> incarnations;
    std::size_t number = 0;
    for (const auto& [since, name] : view_.waiting()) {
      ++decision_.looked_at;
      const NodeReport& report = view_.nodes().at(name).report;
      if (report.wanted_slot >= 0 || !may_be_seated(report) || barred_until(report.host) ||
          left_out_until(report))
        continue;
      if (report.incarnation.empty() || incarnations.insert(report.incarnation).second) ++number;
    }
    return number;
  }

  /// Gives free seats to those that wait.
  void seat() {
    decision_.vacated.assign(view_.vacant().begin(), view_.vacant().end());
    decision_.looked_at += decision_.vacated.size();
    for (const int slot : decision_.vacated)
      vacant_of_host_.emplace(view_.seats().at(slot).host, slot);
    std::set<std::string_view> incarnations;
    const std::size_t all = static_cast<std::size_t>(options_.max_nodes);
    std::size_t free = all - std::min(all, going_on());
    const auto give = [&](const std::string& name, const NodeReport& report) {
      const auto slot = slot_for(report);
      if (!slot) return;
      taken_.insert(*slot);
      incarnations.insert(report.incarnation);
      decision_.seated.emplace_back(*slot, name);
      --free;
    };
    std::vector<std::string> barred_nodes;
    std::set<std::string> first = nodes_that_go_first();
    for (auto each = view_.waiting().begin(); each != view_.waiting().end() && free > 0; ++each) {
      ++decision_.looked_at;
      const NodeReport& report = view_.nodes().at(each->second).report;
      if (!may_be_seated(report)) continue;
      // If one launcher has several holds the first is seated; a later one succeeds it.
      if (!report.incarnation.empty() && incarnations.contains(report.incarnation)) continue;
      if (const auto barred = std::max(barred_until(report.host), left_out_until(report))) {
        ask_again(*barred);
        if (!barred_until(report.host)) barred_nodes.push_back(each->second);
        continue;
      }
      if (first.erase(each->second) > 0 || free > first.size()) give(each->second, report);
    }
    // Better a node with a bad link than too few.
    for (const std::string& name : barred_nodes) {
      if (free == 0 || going_on() + decision_.seated.size() >= at_least()) break;
      const NodeReport& report = view_.nodes().at(name).report;
      if (!incarnations.contains(report.incarnation)) give(name, report);
    }
  }

  /// The epoch of a commit that a node without a seat would bring; 0: none that counts.
  std::int64_t offered_in(const JobView::Node& node) const {
    const std::int64_t offered = node.offered_in();
    return offered >= view_.lost_in() ? offered : 0;
  }

  /// Waiting nodes without which the epoch would begin from an older commit. One is enough, unless
  /// each has a part.
  std::set<std::string> nodes_that_go_first() {
    std::set<std::string> first;
    const bool has_parts = view_.state_holders() > 0;
    if (!options_.keeps_state || (has_parts && view_.may_lose_a_part())) return first;
    std::int64_t newest = has_parts ? view_.state_in() : 0;
    for (const auto& [since, name] : view_.waiting()) {
      ++decision_.looked_at;
      const JobView::Node& node = view_.nodes().at(name);
      const NodeReport& report = node.report;
      const std::int64_t offered = offered_in(node);
      if (offered < std::max<std::int64_t>(newest, 1) || !may_be_seated(report) ||
          barred_until(report.host) || left_out_until(report))
        continue;
      if (offered > newest) first.clear();
      if (first.empty() || view_.state_divided()) first.insert(name);
      newest = offered;
    }
    return first;
  }

  void begin() {
    seat();
    const std::size_t there = decision_.seated.size();
    if (there >= static_cast<std::size_t>(options_.max_nodes))
      return start(0, "all " + count(there, "node") + " have come");
    if (there < static_cast<std::size_t>(options_.min_nodes)) {
      const TimePoint end_of_waiting = later(view_.began(), options_.join_timeout);
      if (now_ < end_of_waiting) return ask_again(end_of_waiting);
      return end(JobState::failed, 1,
                 std::to_string(there) + " of at least " + count(at_least(), "node") + " came" +
                     within(options_.join_timeout) + missing_numbers() +
                     "; are the others started, with the same --rdzv-id and --rdzv-endpoint?");
    }
    const TimePoint call = later(view_.last_arrival(), options_.last_call);
    if (now_ < call) return ask_again(call);
    start(0, count(there, "node") + (there == 1 ? " has" : " have") + " come, and no other" +
                 within(options_.last_call));
  }

  /// Names the seats that are missing, if the nodes were started with numbers of their own.
  std::string missing_numbers() const {
    constexpr std::size_t kNamed = 16;
    std::set<int> there;
    for (const auto& [slot, name] : decision_.seated) {
      if (view_.nodes().at(name).report.wanted_slot < 0) return {};
      there.insert(slot);
    }
    std::string text;
    std::size_t named = 0;
    for (int slot = 0; slot < options_.min_nodes && !there.empty(); ++slot) {
      if (there.contains(slot)) continue;
      if (named++ == kNamed) return text + ", ...";
      text += (text.empty() ? "; missing: node " : ", node ") + std::to_string(slot);
    }
    return text;
  }

  std::size_t at_least() const { return static_cast<std::size_t>(options_.min_nodes); }

  /// Members that are not lost: who has succeeded may be gone.
  std::size_t kept() const { return view_.seats().size() - view_.lost().size(); }

  void go_on() {
    const bool restart = !view_.failures().empty(), loss = !view_.lost().empty();
    if (!restart && !loss && !view_.group_troubles().empty()) return go_on_after_trouble();
    const bool room = view_.seated() < static_cast<std::size_t>(options_.max_nodes);
    if (!restart && !loss && (!room || view_.succeeded() > 0 || view_.waiting().empty())) return;
    seat();
    const std::size_t there = view_.seated() + decision_.seated.size();
    if (!restart && !loss) {
      if (!decision_.seated.empty())
        start(view_.epoch().restarts, count(decision_.seated.size(), "node") + " joined");
      return;
    }
    const bool too_few = there < at_least();
    const bool minority = options_.majority && 2 * kept() <= view_.seats().size();
    if (too_few || minority) return cannot_go_on(there, minority);
    const TimePoint repaired = later(view_.lost_since(), options_.repair_timeout);
    if (loss && there < view_.seats().size() && now_ < repaired) return ask_again(repaired);
    if (waits_for_state()) return;
    const int restarts = view_.epoch().restarts + (counts_as_restart() ? 1 : 0);
    const std::string missing = missing_state();
    start(restarts, loss ? describe_loss() + (missing.empty() ? "" : "; " + missing)
                         : view_.failures().front().reason);
  }

  bool may_have_state(const JobView::Seat& seat) const {
    return seat.has_state || (options_.keeps_state && !seat.heard) || may_have_begun(seat) ||
           keeps_newest(seat);
  }

  /// It stood still before it could tell of a commit: no member is left that would have made it
  /// too, or the one that decided this epoch knew of it.
  bool may_have_begun(const JobView::Seat& seat) const {
    if (!options_.keeps_state || !seat.silent || seat.told_none || view_.state_holders() > 0)
      return false;
    return view_.seated() == 0 || seat.joined <= view_.epoch().state_in;
  }

  /// Its launcher keeps a commit that the job would go on from, as no member has the state.
  bool keeps_newest(const JobView::Seat& seat) const { return is_newest_kept(seat.kept_in); }

  bool is_newest_kept(std::int64_t kept_in) const {
    if (kept_in == 0 || kept_in < view_.lost_in() || view_.state_holders() > 0) return false;
    return std::ranges::none_of(view_.seats(), [&](const auto& other) {
      return other.second.present && other.second.kept_in >= kept_in;
    });
  }

  /// As `keeps_newest`, of a node without a seat; the nodes that are to be seated keep none as new.
  bool keeps_newest(const JobView::SilentKeeper& node) const {
    return options_.keeps_state && is_newest_kept(node.kept_in) &&
           std::ranges::none_of(decision_.seated, [&](const auto& each) {
             return offered_in(view_.nodes().at(each.second)) >= node.kept_in;
           });
  }

  /// It may have a part of the newest commit there is, of which others have parts as well. A commit
  /// that was made since has all parts on members.
  bool keeps_part_of_newest(const JobView::SilentKeeper& node, bool some_missing) const {
    if (!options_.keeps_state || !view_.state_divided() || node.kept_in < view_.lost_in())
      return false;
    if (view_.state_holders() > 0) return some_missing && node.kept_in >= view_.state_in();
    return std::ranges::none_of(view_.seats(),
                                [&](const auto& other) {
                                  return other.second.present &&
                                         other.second.kept_in > node.kept_in;
                                }) &&
           std::ranges::none_of(decision_.seated, [&](const auto& each) {
             return offered_in(view_.nodes().at(each.second)) > node.kept_in;
           });
  }

  /// Says so if the members that are left may not have all of the job's state; else empty.
  std::string missing_state() const {
    const auto gone = std::ranges::count_if(
        view_.lost(), [&](int slot) { return may_have_state(view_.seats().at(slot)); });
    if (static_cast<std::size_t>(gone) <= view_.losses_of_state_borne()) return {};
    return view_.state_holders() == 0 ? kNoState : kOnlyParts;
  }

  /// True if the next epoch would begin without the state and silent members may bring it back.
  bool waits_for_state() {
    std::string missing = missing_state();
    decision_.looked_at += view_.lost().size();
    std::string nodes;
    const auto await = [&](const std::string& node, int slot, TimePoint given_up) {
      nodes += (nodes.empty() ? "" : ", ") + node;
      decision_.awaited.push_back(slot);
      decision_.awaited_until = std::max(decision_.awaited_until, given_up);
      ask_again(given_up);
    };
    for (const int slot : view_.lost()) {
      const JobView::Seat& seat = view_.seats().at(slot);
      const TimePoint given_up = later(seat.lost_at, options_.silence_patience);
      if (missing.empty() || !seat.silent || !may_have_state(seat) || given_up <= now_) continue;
      await(name_of(slot), slot, given_up);
    }
    const bool some_missing = !missing.empty();
    for (const JobView::SilentKeeper& node : view_.silent_keepers()) {
      const TimePoint given_up = later(node.since, options_.silence_patience);
      if (given_up <= now_ || (!keeps_newest(node) && !keeps_part_of_newest(node, some_missing)))
        continue;
      await("a node without a place (" + node.host + ")", -1, given_up);
      if (missing.empty()) missing = kNoState;
    }
    if (nodes.empty()) return false;
    decision_.waits_for = nodes + " fell silent, and " + missing + ": the job waits for up to " +
                          muster::describe(options_.silence_patience);
    return true;
  }

  /// The group has failed, and no process or node has ended.
  void go_on_after_trouble() {
    BlamedGroup failure{.members = {},
                        .blamed = {},
                        .since = view_.troubled_since(),
                        .before = {view_.blamed_before().begin(), view_.blamed_before().end()},
                        .committed = view_.committed(),
                        .ending = view_.has_ending_worker()};
    for (const auto& [slot, seat] : view_.seats()) {
      if (!seat.present) continue;
      failure.members.push_back(slot);
      const bool is_needed = view_.state_holders() == 1 || !view_.may_lose_a_part();
      if (seat.has_state && is_needed) failure.needed.push_back(slot);
    }
    for (const auto& [slot, trouble] : view_.group_troubles())
      failure.blamed[slot] = trouble.blamed;
    decision_.looked_at += failure.members.size();
    FailureOptions rules = options_.failures;
    rules.least = at_least() - std::min(at_least(), spares());
    rules.majority = options_.majority;
    const FailureVerdict verdict = judge_failure(now_, failure, rules);
    if (!verdict.decided) return ask_again(verdict.again);
    const std::string what = describe_trouble(verdict);
    const int restarts = view_.epoch().restarts;
    if (verdict.counts_as_restart && restarts >= options_.max_restarts)
      return end(JobState::failed, 1, what + ", and no restart is left");
    decision_.left_out = verdict.left_out;
    seat();
    std::string nodes;
    for (const int slot : verdict.left_out) nodes += (nodes.empty() ? "" : ", ") + name_of(slot);
    start(
        restarts + (verdict.counts_as_restart ? 1 : 0),
        what + (nodes.empty() ? "; the same nodes go on" : "; the others go on without " + nodes));
  }

  std::string name_of(int slot) const {
    const auto seat = view_.seats().find(slot);
    return "node " + std::to_string(slot) +
           (seat == view_.seats().end() ? "" : " (" + seat->second.host + ")");
  }

  std::string describe_trouble(const FailureVerdict& verdict) const {
    constexpr std::size_t kNamed = 4;
    std::map<int, std::vector<int>> blamed;
    for (const auto& [slot, trouble] : view_.group_troubles()) blamed[slot] = trouble.blamed;
    const bool again = !verdict.bad.empty();
    std::vector<SlotPair> pairs = again ? verdict.bad : blamed_pairs(blamed);
    std::erase(pairs, kNobody);
    std::string text = "the group of epoch " + std::to_string(view_.epoch().number) +
                       " failed and no process has ended";
    for (std::size_t i = 0; i < std::min(pairs.size(), kNamed); ++i) {
      const auto& [one, other] = pairs[i];
      text += (i == 0 ? ": " : ", ") + (one == other
                                            ? "within " + name_of(one)
                                            : "between " + name_of(one) + " and " + name_of(other));
    }
    if (pairs.size() > kNamed) text += " and " + std::to_string(pairs.size() - kNamed) + " more";
    if (again)
      text += ", again within " + muster::describe(options_.failures.window) +
              " or without a new commit since";
    const std::string& said = view_.group_troubles().begin()->second.text;
    return text + (said.empty() ? "" : " (" + said + ")");
  }

  void cannot_go_on(std::size_t there, bool minority) {
    const std::string missing =
        (view_.lost().empty() ? view_.failures().front().reason : describe_loss()) + "; " +
        (minority ? count(kept(), "node") + " of " + std::to_string(view_.seats().size()) +
                        " are left, and without more than half of them the job does not go on"
                  : count(there, "node") + " of at least " + std::to_string(options_.min_nodes) +
                        " are left");
    const TimePoint since =
        view_.lost().empty() ? view_.failures().front().since : view_.lost_since();
    const TimePoint end_of_waiting = later(since, options_.join_timeout);
    if (!options_.wait_for_nodes) return end(JobState::failed, 1, missing);
    if (now_ >= end_of_waiting)
      return end(JobState::failed, 1,
                 missing + ", and no other came" + within(options_.join_timeout));
    ask_again(end_of_waiting);
  }

  std::string describe_loss_of(int slot) const {
    const JobView::Seat& seat = view_.seats().at(slot);
    if (!seat.leave_reason.empty()) return seat.leave_reason;
    return name_of(slot) + " is gone" + (seat.silent ? ": it fell silent" : "");
  }

  /// Names the nodes that leave by their own words, and tells apart those that may live.
  std::string describe_loss() const {
    constexpr std::size_t kNamed = 4;
    if (view_.lost().size() == 1) return describe_loss_of(*view_.lost().begin());
    std::string said, names;
    std::size_t leaving = 0, gone = 0, silent = 0;
    for (const int slot : view_.lost()) {
      const JobView::Seat& seat = view_.seats().at(slot);
      if (!seat.leave_reason.empty()) {
        if (leaving++ < kNamed) said += (said.empty() ? "" : "; ") + seat.leave_reason;
        continue;
      }
      if (seat.silent) ++silent;
      if (gone++ < kNamed) names += (names.empty() ? "" : ", ") + name_of(slot);
    }
    if (leaving > kNamed)
      said += "; so " + std::string(leaving - kNamed == 1 ? "does " : "do ") +
              count(leaving - kNamed, "other node");
    if (gone == 0) return said;
    if (gone > kNamed) names += " and " + std::to_string(gone - kNamed) + " more";
    names += gone == 1 ? " is gone" : " are gone";
    if (silent == gone)
      names += gone == 1 ? ": it fell silent" : ": they fell silent";
    else if (silent > 0)
      names += ": " + std::to_string(silent) + " of them fell silent";
    return said.empty() ? names : names + "; " + said;
  }

  const TimePoint now_, returning_;
  const JobView& view_;
  const EpochOptions& options_;
  const int highest_ = view_.seats().empty() ? -1 : view_.seats().rbegin()->first;
  int next_ = highest_ + 1;
  std::set<int> taken_;  // of the free slots
  std::multimap<std::string, int> vacant_of_host_;
  std::set<int>::const_iterator lowest_vacant_ = view_.vacant().begin();
  std::set<int>::const_iterator lowest_gap_ = view_.gaps().begin();
  Decision decision_;
};

}  // namespace

Decision next_epoch(TimePoint now, const JobView& view, const EpochOptions& options,
                    TimePoint returning) {
  return Deciding(now, view, options, returning).run();
}

}  // namespace muster::membership
