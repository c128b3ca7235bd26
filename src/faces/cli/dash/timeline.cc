// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/dash/timeline.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace muster::cli {
namespace {

using NanosecondSpan = std::pair<std::int64_t, std::int64_t>;

/// The times with at least one call, apart from each other and in order.
std::vector<NanosecondSpan> busy_spans(const trace::RankTrace& rank, const TimelineSpan& span,
                                       std::int64_t now_ns) {
  std::vector<NanosecondSpan> calls, apart;
  for (const auto& record : rank.records) {
    const std::int64_t end = record.under_way() ? now_ns : record.end_ns;
    if (end >= span.begin_ns && record.start_ns < span.end_ns && end >= record.start_ns)
      calls.emplace_back(std::max(record.start_ns, span.begin_ns), std::min(end, span.end_ns));
  }
  std::sort(calls.begin(), calls.end());
  for (const auto& [begin, end] : calls) {
    if (!apart.empty() && begin <= apart.back().second)
      apart.back().second = std::max(apart.back().second, end);
    else
      apart.emplace_back(begin, end);
  }
  return apart;
}

/// From when on all calls of the rank are in the trace.
std::int64_t known_since(const trace::RankTrace& rank) {
  const bool forgot = rank.calls > rank.records.size() && !rank.records.empty();
  return forgot ? rank.records.front().start_ns : rank.since_ns;
}

}  // namespace

std::string timeline_columns(const trace::RankTrace& rank, const TimelineSpan& span,
                             std::int64_t now_ns) {
  const auto count = static_cast<std::size_t>(std::max(span.columns, 1));
  const double width = static_cast<double>(std::max<std::int64_t>(span.end_ns - span.begin_ns, 1)) /
                       static_cast<double>(count);
  const auto column_of = [&](std::int64_t at) {
    const double column = static_cast<double>(at - span.begin_ns) / width;
    return static_cast<std::size_t>(std::clamp(column, 0.0, static_cast<double>(count - 1)));
  };
  std::vector<double> busy(count, 0);
  for (const auto& [begin, end] : busy_spans(rank, span, now_ns)) {
    for (std::size_t at = column_of(begin); at <= column_of(std::max(begin, end - 1)); ++at) {
      const double left = static_cast<double>(span.begin_ns) + static_cast<double>(at) * width;
      const double covered = std::min(static_cast<double>(end), left + width) -
                             std::max(static_cast<double>(begin), left);
      // A call of no measured length is shown all the same.
      busy[at] += std::max(covered, width / 1000);
    }
  }
  std::string out(count, '0');
  const std::int64_t known = known_since(rank);
  for (std::size_t at = 0; at < count; ++at) {
    const double right = static_cast<double>(span.begin_ns) + static_cast<double>(at + 1) * width;
    if (right < static_cast<double>(known)) out[at] = ' ';
    if (busy[at] > 0)
      out[at] = static_cast<char>('1' + std::min(static_cast<int>(busy[at] / width * 9), 8));
  }
  for (const auto& record : rank.records) {
    if (record.under_way() && record.start_ns < span.end_ns && now_ns >= span.begin_ns) {
      const std::size_t last = column_of(std::min(now_ns, span.end_ns));
      for (std::size_t at = column_of(record.start_ns); at <= last; ++at) out[at] = 'w';
    }
  }
  for (const auto& record : rank.records)
    if (record.state == trace::State::failed && record.end_ns >= span.begin_ns &&
        record.end_ns <= span.end_ns)
      out[column_of(record.end_ns)] = 'x';
  return out;
}

}  // namespace muster::cli
