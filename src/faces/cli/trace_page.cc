// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <string>

#include "faces/cli/trace.h"
#include "muster/clock.h"

namespace muster::cli {
namespace {

constexpr double kWidth = 1000;          // of a timeline, in its own units
constexpr std::size_t kRowsShown = 200;  // calls in a rank's table and bars on its line

constexpr const char* kHead = R"(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>muster trace</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em;
  color: #222; background: #fff }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-bottom: .2em }
table { border-collapse: collapse; font-size: .85em }
td, th { text-align: left; padding: .15em .8em .15em 0; border-bottom: 1px solid #ddd }
svg { width: 100%; height: auto; background: #f4f4f4 }
.completed { fill: #4a7fb5 } .failed { fill: #c0392b } .open { fill: #e6a23c }
text { font-size: 12px; fill: #222 } .behind { color: #c0392b }
p.small { font-size: .85em; color: #555 }
</style></head><body>
)";

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", value);
  return text;
}

const char* kind_of(const trace::Record& record) {
  if (record.under_way()) return "open";
  return record.state == trace::State::failed ? "failed" : "completed";
}

std::string clock_time(std::int64_t wall_ns) {
  const std::time_t seconds = wall_ns / 1'000'000'000;
  std::tm parts{};
  ::localtime_r(&seconds, &parts);
  char text[64];
  const auto length = std::strftime(text, sizeof text, "%H:%M:%S", &parts);
  std::snprintf(text + length, sizeof text - length, ".%06lld",
                static_cast<long long>(wall_ns % 1'000'000'000 / 1000));
  return text;
}

std::size_t first_shown(const trace::RankTrace& rank) {
  return rank.records.size() > kRowsShown ? rank.records.size() - kRowsShown : 0;
}

std::string timeline(const trace::JobTrace& job) {
  const std::int64_t now = job.now_ns();
  std::int64_t begin = now;
  for (const auto& rank : job.ranks) {
    for (std::size_t i = first_shown(rank); i < rank.records.size(); ++i)
      begin = std::min(begin, rank.records[i].start_ns);
  }
  const double scale = kWidth / static_cast<double>(std::max<std::int64_t>(now - begin, 1));
  const auto height = 24 * job.ranks.size() + 4;
  std::string out = "<svg viewBox=\"-80 0 " + number(kWidth + 90) + " " + std::to_string(height) +
                    "\" role=\"img\">\n";
  double top = 4;
  for (const auto& rank : job.ranks) {
    out += "<text x=\"-76\" y=\"" + number(top + 14) + "\">rank " + std::to_string(rank.rank) +
           "</text>\n";
    for (std::size_t i = first_shown(rank); i < rank.records.size(); ++i) {
      const auto& record = rank.records[i];
      const std::int64_t end = record.under_way() ? now : record.end_ns;
      const double width = std::max(static_cast<double>(end - record.start_ns) * scale, 1.0);
      out += "<rect class=\"" + std::string(kind_of(record)) + "\" x=\"" +
             number(static_cast<double>(record.start_ns - begin) * scale) + "\" y=\"" +
             number(top) + "\" width=\"" + number(width) + "\" height=\"18\"><title>" +
             escaped(trace::describe(record, rank, now, true)) + "</title></rect>\n";
    }
    top += 24;
  }
  return out + "</svg>\n<p class=\"small\">" + describe(Duration(now - begin)) +
         " from left to right; blue: completed, orange: under way, red: failed. The latest " +
         std::to_string(kRowsShown) + " calls of each rank at most.</p>\n";
}

std::string table(const trace::RankTrace& rank, bool behind) {
  std::string out = std::string("<h2") + (behind ? " class=\"behind\"" : "") + ">Rank " +
                    std::to_string(rank.rank) + (behind ? ", behind" : "") +
                    "</h2>\n<p class=\"small\">process " + std::to_string(rank.pid) + " on " +
                    escaped(rank.host) + ", " + trace::name_of(rank.life) + ", " +
                    std::to_string(rank.calls) + " calls</p>\n";
  if (rank.failures > 0) out += "<p>" + escaped(rank.failure) + "</p>\n";
  out +=
      "<table><tr><th>began</th><th>took</th><th>group</th><th>number</th><th>call</th><th>peer or "
      "root</th><th>state</th></tr>\n";
  for (std::size_t i = rank.records.size(); i > first_shown(rank); --i) {
    const auto& record = rank.records[i - 1];
    out +=
        "<tr><td>" + clock_time(record.start_ns) + "</td><td>" +
        (record.under_way() ? std::string() : describe(Duration(record.end_ns - record.start_ns))) +
        "</td><td>" + escaped(rank.groups[record.group].name) + "</td><td>" +
        (record.sequence != 0 ? std::to_string(record.sequence) : "") + "</td><td>" +
        escaped(trace::describe(record)) + "</td><td>" +
        (record.peer >= 0 ? std::to_string(record.peer) : "") + "</td><td>" +
        (record.under_way() ? "under way" : kind_of(record)) + "</td></tr>\n";
  }
  return out + "</table>\n";
}

}  // namespace

std::string timeline_page(const trace::JobTrace& job) {
  const auto holdups = trace::find_holdups(job);
  std::string headline = trace::headline(job, holdups);
  headline.front() = static_cast<char>(headline.front() >= 'a' && headline.front() <= 'z'
                                           ? headline.front() - 'a' + 'A'
                                           : headline.front());
  std::string out = kHead;
  out += "<h1 id=\"headline\">" + escaped(headline) + "</h1>\n";
  out += "<p class=\"small\">Job " + escaped(job.ranks.front().job) + ", " +
         std::to_string(job.world_size()) + " ranks; traces of " +
         std::to_string(job.ranks.size()) + "</p>\n";
  out += timeline(job);
  for (const auto& rank : job.ranks) {
    const bool behind = !holdups.empty() && !holdups.front().usual &&
                        std::find(holdups.front().behind.begin(), holdups.front().behind.end(),
                                  rank.rank) != holdups.front().behind.end();
    out += table(rank, behind);
  }
  return out + "</body></html>\n";
}

}  // namespace muster::cli
