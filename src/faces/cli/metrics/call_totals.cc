// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/metrics/call_totals.h"

#include <algorithm>
#include <optional>

namespace muster::cli {
namespace {

double in_seconds(std::int64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; }

}  // namespace

void CallSums::add(const CallSums& more, double times) {
  calls += more.calls * times;
  bytes += more.bytes * times;
  waiting += more.waiting * times;
  moving += more.moving * times;
  unattributed += more.unattributed * times;
}

/// When the ranks of one look entered their collectives.
class CallTotals::EntryTimes {
 public:
  explicit EntryTimes(const trace::JobTrace& job) {
    std::set<int> present;
    for (const auto& trace : job.ranks) present.insert(trace.rank);
    for (const auto& trace : job.ranks) {
      for (const auto& group : trace.groups) {
        const auto [at, is_new] = groups_.try_emplace({group.name, group.members});
        if (!is_new) continue;
        at->second.id = groups_.size();
        at->second.here = std::count_if(group.members.begin(), group.members.end(),
                                        [&](int member) { return present.contains(member); });
      }
      const auto groups = groups_of(trace);
      for (const auto& record : trace.records) {
        if (record.sequence > 0)
          entries_.push_back({groups[record.group].id, record.sequence, record.start_ns});
      }
    }
    std::sort(entries_.begin(), entries_.end());
  }

  // Groups of one name with other members are other groups.
  struct KnownGroup {
    std::size_t id = 0;
    std::ptrdiff_t here = 0;  // members of this node
  };
  /// By their index in the trace.
  std::vector<KnownGroup> groups_of(const trace::RankTrace& trace) const {
    std::vector<KnownGroup> known;
    for (const auto& group : trace.groups)
      known.push_back(groups_.find({group.name, group.members})->second);
    return known;
  }

  struct Span {
    std::int64_t first = 0, last = 0;
  };
  /// When the first and the last rank of this node entered a call; none unless all members on this
  /// node are seen in it, and there are several.
  std::optional<Span> span_of(const KnownGroup& group, std::uint64_t sequence) const {
    if (sequence == 0 || group.here < 2) return std::nullopt;
    const auto from =
        std::lower_bound(entries_.begin(), entries_.end(), EnteredCall{group.id, sequence, 0});
    auto to = from;
    while (to != entries_.end() && to->group == group.id && to->sequence == sequence) ++to;
    if (to - from != group.here) return std::nullopt;
    return Span{from->start_ns, (to - 1)->start_ns};
  }

 private:
  struct EnteredCall {
    std::size_t group;
    std::uint64_t sequence;
    std::int64_t start_ns;
    auto operator<=>(const EnteredCall&) const = default;
  };

  std::map<std::pair<std::string, std::vector<int>>, KnownGroup> groups_;
  std::vector<EnteredCall> entries_;
};

void CallTotals::add(const trace::JobTrace& job) {
  const EntryTimes entries(job);
  for (const auto& trace : job.ranks) add(trace, entries);
}

void CallTotals::add(const trace::RankTrace& trace, const EntryTimes& entries) {
  Counted& counted = traces_[{trace.path, trace.pid, trace.since_ns}];
  std::map<CallKind, CallSums> seen;
  std::map<std::pair<int, std::string>, LateSums> late;
  const auto groups = entries.groups_of(trace);
  std::set<std::uint64_t> under_way;
  std::uint64_t last = trace.calls, fresh = 0;
  for (const auto& record : trace.records) {
    last = std::max(last, record.ticket);
    if (record.under_way()) {
      under_way.insert(record.ticket);
      continue;
    }
    if (record.ticket <= counted.last && !counted.under_way.contains(record.ticket)) continue;
    ++fresh;
    const std::string& group = trace.groups[record.group].name;
    const std::int64_t took = std::max<std::int64_t>(record.end_ns - record.start_ns, 0);
    CallSums one{.calls = 1, .bytes = static_cast<double>(record.bytes)};
    if (const auto span = entries.span_of(groups[record.group], record.sequence)) {
      const auto waited = std::clamp<std::int64_t>(span->last - record.start_ns, 0, took);
      one.waiting = in_seconds(waited);
      one.moving = in_seconds(took - waited);
      LateSums& behind = late[{trace.rank, group}];
      behind.calls += 1;
      behind.seconds += in_seconds(record.start_ns - span->first);
    } else {
      one.unattributed = in_seconds(took);
    }
    seen[{trace.rank, group, record.name}].add(one, 1);
  }
  failures_[trace.rank] += static_cast<double>(trace.failures - counted.failures);
  counted.failures = trace.failures;
  // Calls that ended unseen wait for one that is seen, to be taken for its like.
  if (fresh == 0) return;
  const std::uint64_t ended = std::max(last - under_way.size(), counted.ended + fresh);
  const auto all = static_cast<double>(ended - counted.ended);
  const double times = all / static_cast<double>(fresh);
  for (const auto& [kind, sums] : seen) calls_[kind].add(sums, times);
  for (const auto& [place, sums] : late) {
    late_[place].calls += sums.calls * times;
    late_[place].seconds += sums.seconds * times;
  }
  estimated_[trace.rank] += all - static_cast<double>(fresh);
  counted = {last, std::move(under_way), ended, trace.failures};
}

}  // namespace muster::cli
