// SPDX-License-Identifier: BSD-3-Clause
#include "core/trace/analysis.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "muster/clock.h"

namespace muster::trace {
namespace {

constexpr std::size_t kRanksListed = 10;
/// The wait that is always `usual`, and how many earlier calls are considered for longer ones.
constexpr std::int64_t kShortWait = 1'000'000'000;
constexpr int kLastCalls = 32;

std::string ago(std::int64_t then, std::int64_t now) {
  return muster::describe(Duration(std::max<std::int64_t>(now - then, 0)));
}

/// The last collective of a rank on a group that has not succeeded; null if the trace has none.
const Record* open_call(const RankTrace& trace, const std::string& group) {
  for (auto at = trace.records.rbegin(); at != trace.records.rend(); ++at) {
    if (at->sequence == 0 || at->state == State::completed || trace.groups[at->group].name != group)
      continue;
    // A failure that was followed by a successful call did not break the group (wrong arguments).
    if (at->state == State::failed && trace.group(group)->completed > at->sequence) return nullptr;
    const Record* earliest = &*at;
    for (auto before = at; before != trace.records.rend(); ++before) {
      if (before->sequence != 0 && before->under_way() && trace.groups[before->group].name == group)
        earliest = &*before;
    }
    return earliest;
  }
  return nullptr;
}

struct TracedMember {
  int rank;
  const RankTrace* trace;   // null: no trace
  const GroupTrace* group;  // null: the rank has not created the group
  const Record* open;       // null: between calls
};

std::vector<TracedMember> members_of(const JobTrace& job, const std::string& name) {
  std::set<int> ranks;
  for (const auto& trace : job.ranks) {
    if (const auto* group = trace.group(name))
      ranks.insert(group->members.begin(), group->members.end());
  }
  std::vector<TracedMember> members;
  for (const int rank : ranks) {
    const auto* trace = job.rank(rank);
    const auto* group = trace != nullptr ? trace->group(name) : nullptr;
    members.push_back({rank, trace, group, group != nullptr ? open_call(*trace, name) : nullptr});
  }
  return members;
}

template <class Test>
std::vector<int> ranks_where(const std::vector<TracedMember>& members, Test test) {
  std::vector<int> ranks;
  for (const auto& member : members) {
    if (test(member)) ranks.push_back(member.rank);
  }
  return ranks;
}

std::uint64_t completed_of(const TracedMember& member) {
  return member.group != nullptr ? member.group->completed : 0;
}

/// The call that a member made on `group` under this number; null if the trace does not have it.
const Record* call_of(const TracedMember& member, const std::string& group,
                      std::uint64_t sequence) {
  if (member.trace == nullptr) return nullptr;
  for (const auto& record : member.trace->records) {
    if (record.sequence == sequence && member.trace->groups[record.group].name == group)
      return &record;
  }
  return nullptr;
}

/// The members whose call `sequence` differs from that of most members, if one of these calls has
/// failed. The engine compares more than a trace holds (reduce operations, sizes), so calls that
/// look equal here may have differed there.
std::vector<int> odd_ones(const std::vector<TracedMember>& members, const std::string& group,
                          std::uint64_t sequence) {
  std::map<std::tuple<std::string, std::string, int>, std::vector<int>> kinds;
  bool failed = false;
  for (const auto& member : members) {
    const auto* call = call_of(member, group, sequence);
    if (call == nullptr) continue;
    failed = failed || call->state == State::failed;
    kinds[{call->name, call->dtype, call->peer}].push_back(member.rank);
  }
  if (!failed || kinds.size() < 2) return {};
  const auto common =
      std::max_element(kinds.begin(), kinds.end(), [](const auto& a, const auto& b) {
        // On a tie, the set with the lowest rank counts as right.
        return std::pair(a.second.size(), -a.second.front()) <
               std::pair(b.second.size(), -b.second.front());
      });
  std::vector<int> odd;
  for (auto at = kinds.begin(); at != kinds.end(); ++at) {
    if (at != common) odd.insert(odd.end(), at->second.begin(), at->second.end());
  }
  std::sort(odd.begin(), odd.end());
  return odd;
}

/// If ranks make a different call, they are the ones that hold up the group. The first member that
/// met them failed the group for the others too, which may have been in an earlier call.
bool find_different(const std::vector<TracedMember>& members, Holdup& holdup) {
  std::set<std::uint64_t> last;  // calls of the members, those that may be the different ones
  for (const auto& member : members) {
    if (member.group != nullptr && member.group->started >= holdup.sequence)
      last.insert(member.group->started);
  }
  std::vector<int> odd;
  for (auto at = last.begin(); at != last.end() && odd.empty(); ++at) {
    odd = odd_ones(members, holdup.group, *at);
    if (!odd.empty()) holdup.sequence = *at;
  }
  if (odd.empty()) return false;
  holdup.reason = Reason::different;
  holdup.behind = odd;
  for (const auto& member : members) {
    const auto* call = call_of(member, holdup.group, holdup.sequence);
    if (call == nullptr) continue;
    const bool is_odd = std::find(odd.begin(), odd.end(), member.rank) != odd.end();
    if (!is_odd) {
      holdup.call = describe(*call);
      holdup.since_ns = call->start_ns;
    }
    if (member.rank == odd.front()) holdup.other_call = describe(*call);
  }
  return true;
}

/// The failure of a group also ends calls in which no rank was missing. The missing rank is the one
/// that is between calls and behind: it did not enter the call after its last.
bool find_missed(const std::vector<TracedMember>& members, std::uint64_t most, Holdup& holdup) {
  const bool failed = std::any_of(members.begin(), members.end(), [](const TracedMember& member) {
    return member.open != nullptr && member.open->state == State::failed;
  });
  if (!failed) return false;
  std::uint64_t last = most;
  for (const auto& member : members)
    if (member.group != nullptr && member.open == nullptr)
      last = std::min(last, member.group->started);
  if (last == most) return false;
  for (const auto& member : members) {
    const auto* call = call_of(member, holdup.group, last + 1);
    if (call == nullptr) continue;
    holdup.reason = Reason::not_entered;
    holdup.behind = ranks_where(members, [&](const TracedMember& one) {
      return one.group != nullptr && one.open == nullptr && one.group->started == last;
    });
    holdup.sequence = last + 1;
    holdup.call = describe(*call);
    holdup.since_ns = call->start_ns;
    return true;
  }
  return false;  // the ring has overwritten that call
}

/// The longest of the last calls that a rank completed on `group`.
std::int64_t longest_of_last(const RankTrace& trace, const std::string& group) {
  std::int64_t longest = 0;
  int calls = 0;
  for (auto at = trace.records.rbegin(); at != trace.records.rend() && calls < kLastCalls; ++at) {
    if (at->sequence == 0 || at->state != State::completed || trace.groups[at->group].name != group)
      continue;
    longest = std::max(longest, at->end_ns - at->start_ns);
    ++calls;
  }
  return longest;
}

bool is_usual(const Holdup& holdup, const std::vector<TracedMember>& members, std::int64_t now) {
  if (holdup.reason != Reason::not_entered && holdup.reason != Reason::unfinished) return false;
  std::int64_t longest = kShortWait;
  for (const auto& member : members) {
    if (member.trace == nullptr) continue;
    if (member.trace->life != Life::running ||
        (member.open != nullptr && !member.open->under_way()))
      return false;
    longest = std::max(longest, 2 * longest_of_last(*member.trace, holdup.group));
  }
  return now - holdup.since_ns <= longest;
}

/// When the last of these ranks failed in its call there; 0 unless all have, and have left the
/// group since: they are no longer in it.
std::int64_t failed_at(const std::vector<TracedMember>& members, const std::vector<int>& ranks) {
  std::int64_t last = 0;
  for (const auto& member : members) {
    if (std::find(ranks.begin(), ranks.end(), member.rank) == ranks.end()) continue;
    if (member.trace->life != Life::left || member.open->state != State::failed) return 0;
    last = std::max(last, member.open->end_ns);
  }
  return last;
}

std::optional<Holdup> holdup_of(const JobTrace& job, const std::string& name) {
  const auto members = members_of(job, name);
  const Record* first = nullptr;  // the earliest call that a rank is in
  std::uint64_t most = 0, fewest = ~std::uint64_t{0};
  for (const auto& member : members) {
    if (member.open != nullptr && (first == nullptr || member.open->sequence < first->sequence))
      first = member.open;
    if (member.trace == nullptr)
      continue;  // no trace: a rank of another host, or one that ended well
    most = std::max(most, member.group != nullptr ? member.group->started : 0);
    fewest = std::min(fewest, completed_of(member));
  }
  if (first == nullptr) return std::nullopt;
  Holdup holdup;
  holdup.group = name;
  holdup.sequence = first->sequence;
  holdup.call = describe(*first);
  holdup.since_ns = first->start_ns;
  holdup.gap = most - fewest;
  for (const auto& member : members) {
    if (member.open == nullptr || member.open->sequence != first->sequence) continue;
    holdup.since_ns = std::min(holdup.since_ns, member.open->start_ns);
  }
  const auto inside = [&](const TracedMember& member) {
    return member.group != nullptr && member.group->started >= first->sequence;
  };
  if (!find_different(members, holdup) && !find_missed(members, most, holdup)) {
    holdup.reason = Reason::not_entered;
    holdup.behind = ranks_where(members, [&](const TracedMember& member) {
      return member.trace != nullptr && !inside(member);
    });
  }
  for (const auto& [life, reason] :
       {std::pair(Life::gone, Reason::gone), std::pair(Life::stopped, Reason::stopped)}) {
    if (!holdup.behind.empty()) break;
    holdup.reason = reason;
    holdup.behind = ranks_where(
        // Ranks whose call failed ended after the failure, so they did not cause it.
        members, [&, life = life](const TracedMember& member) {
          return member.open != nullptr && member.open->under_way() && member.trace->life == life;
        });
    // If all of them are gone, none can be singled out.
    if (holdup.behind.size() == members.size()) holdup.behind.clear();
  }
  if (holdup.behind.empty()) {
    holdup.reason = Reason::unfinished;
    holdup.behind = ranks_where(members, [&](const TracedMember& member) {
      return member.trace != nullptr && completed_of(member) == fewest;
    });
    if (holdup.behind.size() == members.size()) holdup.behind.clear();
  }
  holdup.waiting = ranks_where(members, [&](const TracedMember& member) {
    if (holdup.sequence != first->sequence && member.open != nullptr &&
        member.open->sequence != holdup.sequence)
      return false;
    return member.open != nullptr && std::find(holdup.behind.begin(), holdup.behind.end(),
                                               member.rank) == holdup.behind.end();
  });
  holdup.failed_ns = failed_at(members, holdup.waiting);
  holdup.usual = is_usual(holdup, members, job.now_ns());
  return holdup;
}

std::string describe_life(const RankTrace& trace) {
  if (trace.life == Life::running) return {};
  if (trace.life == Life::left) return " (it has left the group, and its process lives)";
  return trace.life == Life::stopped ? " (its process is stopped)" : " (its process is gone)";
}

/// Whether the processes of these ranks have ended while another rank's lives.
bool ended_alone(const std::vector<int>& ranks, const JobTrace& job) {
  const auto lives = [](const RankTrace& trace) { return trace.life != Life::gone; };
  return std::any_of(job.ranks.begin(), job.ranks.end(), lives) &&
         std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
           const RankTrace* trace = job.rank(rank);
           return trace != nullptr && !lives(*trace);
         });
}

std::string describe(const Holdup& holdup, const JobTrace& job) {
  const bool one = holdup.behind.size() == 1;
  const std::string call = "call " + std::to_string(holdup.sequence) + " of group '" +
                           holdup.group + "', " + holdup.call;
  const std::string began = ago(holdup.since_ns, job.now_ns());
  std::string text = holdup.waiting.empty() ? call + ", began " + began + " ago"
                     : holdup.failed_ns > 0
                         ? list_ranks(holdup.waiting) + " failed in " + call + ", " +
                               ago(holdup.failed_ns, job.now_ns()) + " ago, after " +
                               ago(holdup.since_ns, holdup.failed_ns)
                         : list_ranks(holdup.waiting) +
                               (holdup.waiting.size() == 1 ? " is in " : " are in ") + call +
                               ", for " + began;
  if (holdup.behind.empty()) return text + "; no member is behind the others";
  text += "; " + list_ranks(holdup.behind);
  switch (holdup.reason) {
    case Reason::different: return text + " called " + holdup.other_call + " as that number";
    case Reason::not_entered:
      text += (one ? " has" : " have") + std::string(" not entered it");
      if (!ended_alone(holdup.behind, job)) return text;
      return text + (one ? ", and its process is gone" : ", and their processes are gone");
    case Reason::gone: return text + (one ? " was" : " were") + " in it when the process ended";
    case Reason::stopped: return text + (one ? " is" : " are") + " in it too, but stopped";
    case Reason::unfinished: break;
  }
  return text + (one ? " has" : " have") + " completed the fewest calls";
}

std::string describe_rank(const RankTrace& trace, std::int64_t now) {
  std::string text = "rank " + std::to_string(trace.rank) + ", process " +
                     std::to_string(trace.pid) + " on " + trace.host + ", " + name_of(trace.life) +
                     ": " + std::to_string(trace.calls) + " calls\n";
  for (const auto& group : trace.groups) {
    text += "  group '" + group.name + "' (rank " + std::to_string(group.rank) + " of " +
            std::to_string(group.size) + "): " + std::to_string(group.started) +
            " collectives called, " + std::to_string(group.completed) + " completed\n";
  }
  if (const auto* last = trace.latest())
    text += "  last: " + describe(*last, trace, now, true) + "\n";
  for (const auto& record : trace.records) {
    if (record.under_way() && &record != trace.latest())
      text += "  also under way: " + describe(record, trace, now, true) + "\n";
  }
  if (trace.failures > 0)
    text += "  failed " + ago(trace.failure_at_ns, now) + " ago: " + trace.failure + "\n";
  if (trace.dropped + trace.torn > 0) {
    text += "  " + std::to_string(trace.dropped) +
            " calls were not recorded (the ring is too small: MUSTER_TRACE_ENTRIES), " +
            std::to_string(trace.torn) + " changed while they were read\n";
  }
  return text;
}

}  // namespace

std::vector<Holdup> find_holdups(const JobTrace& job) {
  std::set<std::string> names;
  for (const auto& trace : job.ranks) {
    for (const auto& group : trace.groups) names.insert(group.name);
  }
  std::vector<Holdup> holdups;
  for (const auto& name : names) {
    if (auto holdup = holdup_of(job, name)) holdups.push_back(std::move(*holdup));
  }
  std::stable_sort(holdups.begin(), holdups.end(), [](const auto& a, const auto& b) {
    return std::tuple(a.behind.empty(), a.usual, b.gap, a.since_ns) <
           std::tuple(b.behind.empty(), b.usual, a.gap, b.since_ns);
  });
  return holdups;
}

std::string describe(const Record& record) {
  std::string text = record.name;
  if (record.dtype.empty()) return text;
  text += " of " + std::to_string(record.bytes) + " bytes (" + record.dtype + " [";
  for (std::size_t i = 0; i < record.shape.size(); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(record.shape[i]);
  return text + (record.dimensions > static_cast<int>(record.shape.size()) ? ", ..." : "") + "])";
}

std::string describe(const Record& record, const RankTrace& trace, std::int64_t now_ns,
                     bool elsewhere) {
  std::string text = record.sequence != 0 ? "number " + std::to_string(record.sequence) + ", " : "";
  text += describe(record);
  if (record.sequence == 0) {
    text += std::string(record.name.find("recv") != std::string::npos ? " from " : " with ") +
            (record.peer < 0 ? std::string("any rank") : "rank " + std::to_string(record.peer)) +
            ", tag " + std::to_string(record.tag);
  }
  if (elsewhere) text += ", of group '" + trace.groups[record.group].name + "'";
  switch (record.state) {
    case State::queued:
    case State::started:
      return text + ", called " + ago(record.start_ns, now_ns) + " ago and under way";
    case State::completed: return text + ", completed " + ago(record.end_ns, now_ns) + " ago";
    case State::failed: break;
  }
  return text + ", failed " + ago(record.end_ns, now_ns) + " ago";
}

std::string last_act(const RankTrace& trace, const std::string& group, std::int64_t now_ns) {
  const std::string rank = "rank " + std::to_string(trace.rank) + describe_life(trace);
  const auto* there = trace.group(group);
  const Record* last = nullptr;
  for (const auto& record : trace.records) {
    if (record.sequence != 0 && trace.groups[record.group].name == group) last = &record;
  }
  std::string text = there == nullptr ? rank + " has not made this group"
                     : last == nullptr
                         ? rank + " has made " + std::to_string(there->started) + " calls there"
                         : rank + "'s last call there is " + describe(*last, trace, now_ns, false);
  const auto* latest = trace.latest();
  if (latest != nullptr && latest != last)
    text += "; the last of all is " + describe(*latest, trace, now_ns, true);
  if (latest == nullptr) text += "; it has made no calls at all";
  return text;
}

std::string list_ranks(std::span<const int> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i == kRanksListed) return text + " and " + std::to_string(ranks.size() - i) + " more";
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

std::string title(const JobTrace& job) {
  const RankTrace& first = job.ranks.front();
  return "job " + (first.run_id.empty() ? std::string() : "'" + first.run_id + "', ") + first.job +
         ", begun " + ago(first.since_ns, wall_now_ns()) + " ago";
}

std::string headline(const JobTrace& job, const std::vector<Holdup>& holdups) {
  if (holdups.empty()) return "no rank is behind: nobody waits in a collective";
  const auto& worst = holdups.front();
  if (worst.behind.empty()) return "no rank is behind the others in group '" + worst.group + "'";
  if (worst.usual) return "no rank is behind yet: " + describe(worst, job);
  const bool one = worst.behind.size() == 1;
  const char* what = worst.reason == Reason::different
                         ? (one ? " makes a different call: " : " make different calls: ")
                         : (one ? " is behind: " : " are behind: ");
  return list_ranks(worst.behind) + what + describe(worst, job);
}

std::string summary(const JobTrace& job) {
  const auto now = job.now_ns();
  const auto holdups = find_holdups(job);
  std::string text = headline(job, holdups) + "\n\n";
  text += title(job) + ": " + std::to_string(job.world_size()) + " ranks, " +
          std::to_string(job.ranks.size()) + " traces in " + job.directory + "\n";
  const auto writes = [](const RankTrace& trace) { return is_open(trace.life); };
  if (std::none_of(job.ranks.begin(), job.ranks.end(), writes))
    text +=
        "no rank writes any more; the times of calls count back from the last that was traced, " +
        ago(now, wall_now_ns()) + " ago\n";
  if (holdups.size() > 1) {
    text += "\n";
    for (const auto& holdup : holdups) text += "- " + describe(holdup, job) + "\n";
  }
  text += "\n";
  for (const auto& trace : job.ranks) text += describe_rank(trace, now);
  if (static_cast<int>(job.ranks.size()) < job.world_size()) {
    std::vector<int> without;
    for (int rank = 0; rank < job.world_size(); ++rank) {
      if (job.rank(rank) == nullptr) without.push_back(rank);
    }
    text +=
        "no trace here of " + list_ranks(without) +
        ": on another host (`muster trace --store` asks all), ended well, or without an answer\n";
  }
  for (const auto& why : job.unread) text += "left out: " + why + "\n";
  return text;
}

Rates rates_of(const RankTrace& trace, std::int64_t now_ns, std::int64_t window_ns) {
  std::int64_t begin = std::max(now_ns - window_ns, trace.since_ns);
  // Overwritten entries cannot be counted.
  if (!trace.records.empty() && trace.calls > trace.records.size())
    begin = std::max(begin, trace.records.front().start_ns);
  const double seconds = static_cast<double>(std::max<std::int64_t>(now_ns - begin, 1)) * 1e-9;
  Rates rates;
  std::vector<std::pair<std::int64_t, std::int64_t>> spans;
  for (const auto& record : trace.records) {
    const std::int64_t end = record.under_way() ? now_ns : record.end_ns;
    if (end <= begin) continue;
    spans.emplace_back(std::max(record.start_ns, begin), end);
    if (record.under_way()) continue;
    rates.operations += 1 / seconds;
    rates.bytes += static_cast<double>(record.bytes) / seconds;
  }
  std::sort(spans.begin(), spans.end());
  std::int64_t covered = begin, busy = 0;
  for (const auto& [from, to] : spans) {
    busy += std::max<std::int64_t>(to - std::max(from, covered), 0);
    covered = std::max(covered, to);
  }
  rates.busy = std::min(1.0, static_cast<double>(busy) * 1e-9 / seconds);
  return rates;
}

}  // namespace muster::trace
