// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/top/top_table.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <utility>
#include <vector>

#include "faces/cli/printable.h"
#include "faces/cli/trace.h"

namespace muster::cli {
namespace {

constexpr const char* kBold = "\033[1m";
constexpr const char* kRed = "\033[31m";
constexpr const char* kYellow = "\033[33m";
constexpr const char* kPlain = "\033[0m";

std::string scaled(double value) {
  static constexpr const char* kUnits[] = {"", "K", "M", "G", "T"};
  int unit = 0;
  for (; value >= 999.5 && unit < 4; ++unit) value /= 1000;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 && value < 10 ? "%.1f%s" : "%.3g%s", value,
                kUnits[unit]);
  return text;
}

/// The first `columns` characters of UTF-8.
std::string cut_to_columns(const std::string& line, std::size_t columns) {
  std::size_t characters = 0;
  for (std::size_t at = 0; at < line.size(); ++at) {
    const bool begins = (static_cast<unsigned char>(line[at]) & 0xc0) != 0x80;
    if (begins && characters++ == columns) return line.substr(0, at);
  }
  return line;
}

struct TopRow {
  const trace::RankTrace* rank;
  trace::Rates rates{};
  const trace::Record* waits = nullptr;
  std::int64_t behind = 0;  // nanoseconds
};

class TopTable {
 public:
  TopTable(const trace::JobTrace& job, const TopStyle& style)
      : job_(job), style_(style), now_(job.now_ns()), holdups_(trace::find_holdups(job)) {}

  std::string text() {
    line(trace::title(job_) + ": " + std::to_string(job_.world_size()) + " ranks, " +
         std::to_string(job_.ranks.size()) + " shown; " + trace::headline(job_, holdups_));
    char head[256];
    std::snprintf(head, sizeof head, "%5s %8s %-8s %6s %8s %8s  %s", "rank", "pid", "process",
                  "wait", "calls/s", "bytes/s", "in flight");
    line(head, kBold);
    for (const TopRow& row : rows()) put(row);
    return std::move(text_);
  }

 private:
  void line(const std::string& words, const char* colour = nullptr) {
    std::string shown = printable_line(words);
    if (style_.columns > 0) shown = cut_to_columns(shown, style_.columns);
    const bool coloured = style_.colour && colour != nullptr;
    text_ += coloured ? colour + shown + kPlain + "\n" : shown + "\n";
  }

  std::vector<TopRow> rows() const {
    const auto behind = nanoseconds_behind(job_, holdups_);
    std::vector<TopRow> rows;
    for (const auto& rank : job_.ranks) {
      TopRow row{&rank};
      if (trace::is_open(rank.life)) row.rates = trace::rates_of(rank, now_, kRateWindow);
      row.waits = in_flight(rank);
      if (const auto found = behind.find(rank.rank); found != behind.end())
        row.behind = found->second;
      rows.push_back(row);
    }
    std::stable_sort(rows.begin(), rows.end(),
                     [this](const auto& a, const auto& b) { return key(a) > key(b); });
    return rows;
  }

  /// Rows with larger keys come first; those with equal ones by rank.
  std::pair<double, double> key(const TopRow& row) const {
    switch (style_.order) {
      case TopOrder::wait: return {row.rates.busy, 0};
      case TopOrder::calls: return {row.rates.operations, 0};
      case TopOrder::bytes: return {row.rates.bytes, 0};
      case TopOrder::late:
        return {static_cast<double>(row.behind),
                row.waits == nullptr ? -1 : static_cast<double>(now_ - row.waits->start_ns)};
      case TopOrder::rank: break;
    }
    return {0, 0};
  }

  void put(const TopRow& row) {
    const auto& rank = *row.rank;
    char begin[256];
    std::snprintf(begin, sizeof begin, "%5d %8lld %-8s %5.0f%% %8s %8s  ", rank.rank,
                  static_cast<long long>(rank.pid), trace::name_of(rank.life), row.rates.busy * 100,
                  scaled(row.rates.operations).c_str(), scaled(row.rates.bytes).c_str());
    const char* const colour = row.behind > 0                      ? kRed
                               : rank.life == trace::Life::running ? nullptr
                                                                   : kYellow;
    line(begin + (row.waits == nullptr ? "-" : trace::describe(*row.waits, rank, now_, true)),
         colour);
    if (rank.failures > 0)
      line("        last error: " + rank.failure.substr(0, rank.failure.find('\n')), colour);
  }

  const trace::JobTrace& job_;
  const TopStyle style_;
  const std::int64_t now_;
  const std::vector<trace::Holdup> holdups_;
  std::string text_;
};

}  // namespace

std::string top_table(const trace::JobTrace& job, const TopStyle& style) {
  return TopTable(job, style).text();
}

}  // namespace muster::cli
