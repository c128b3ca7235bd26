// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "faces/cli/trace.h"

namespace muster::cli {
namespace {

using nlohmann::json;

const char* text_of(trace::State state) {
  switch (state) {
    case trace::State::queued: return "queued";
    case trace::State::started: return "started";
    case trace::State::completed: return "completed";
    case trace::State::failed: break;
  }
  return "failed";
}

json event_of(const trace::RankTrace& rank, const trace::Record& record, std::int64_t begin,
              std::int64_t now) {
  const auto microseconds = [](std::int64_t nanoseconds) {
    return static_cast<double>(nanoseconds) / 1000;
  };
  const std::int64_t end = record.under_way() ? now : record.end_ns;
  json event = {{"name", record.name},
                {"cat", record.sequence != 0 ? "collective" : "point-to-point"},
                {"ph", "X"},
                {"pid", rank.rank},
                {"tid", record.group},
                {"ts", microseconds(record.start_ns - begin)},
                {"dur", microseconds(std::max<std::int64_t>(end - record.start_ns, 0))}};
  event["args"] = {
      {"call", trace::describe(record)}, {"bytes", record.bytes}, {"dtype", record.dtype},
      {"shape", record.shape},           {"peer", record.peer},   {"state", text_of(record.state)},
      {"thread", record.thread},         {"tag", record.tag},     {"asynchronous", record.async},
      {"sequence", record.sequence}};
  return event;
}

}  // namespace

std::string timeline_json(const trace::JobTrace& job) {
  const std::int64_t now = job.now_ns();
  std::int64_t begin = now;
  for (const auto& rank : job.ranks) {
    for (const auto& record : rank.records) begin = std::min(begin, record.start_ns);
  }
  json events = json::array();
  for (const auto& rank : job.ranks) {
    const std::string title = "rank " + std::to_string(rank.rank) + " (process " +
                              std::to_string(rank.pid) + " on " + rank.host + ", " +
                              trace::name_of(rank.life) + ")";
    events.push_back(
        {{"name", "process_name"}, {"ph", "M"}, {"pid", rank.rank}, {"args", {{"name", title}}}});
    events.push_back({{"name", "process_sort_index"},
                      {"ph", "M"},
                      {"pid", rank.rank},
                      {"args", {{"sort_index", rank.rank}}}});
    for (std::size_t group = 0; group < rank.groups.size(); ++group) {
      events.push_back({{"name", "thread_name"},
                        {"ph", "M"},
                        {"pid", rank.rank},
                        {"tid", group},
                        {"args", {{"name", "group " + rank.groups[group].name}}}});
    }
    for (const auto& record : rank.records) events.push_back(event_of(rank, record, begin, now));
  }
  const json whole = {
      {"traceEvents", events},
      {"displayTimeUnit", "ns"},
      {"otherData",
       {{"headline", trace::headline(job, trace::find_holdups(job))}, {"begins_at_ns", begin}}}};
  return whole.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
}

}  // namespace muster::cli
