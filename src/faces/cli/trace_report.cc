// SPDX-License-Identifier: BSD-3-Clause
// What `muster trace --json` and `muster top --json` print, and the page of `muster dash` shows.
#include <nlohmann/json.hpp>

#include "faces/cli/json_line.h"
#include "faces/cli/trace.h"

namespace muster::cli {
namespace {

using nlohmann::json;

const char* name_of(trace::Reason reason) {
  switch (reason) {
    case trace::Reason::different: return "different";
    case trace::Reason::not_entered: return "not_entered";
    case trace::Reason::gone: return "gone";
    case trace::Reason::stopped: return "stopped";
    case trace::Reason::unfinished: return "unfinished";
  }
  return "unknown";
}

double seconds(std::int64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; }

json call_json(const trace::Record& call, const trace::RankTrace& rank, std::int64_t now) {
  const bool known = call.group < rank.groups.size();
  json out = {{"name", call.name},
              {"group", known ? json(rank.groups[call.group].name) : json()},
              {"sequence", call.sequence == 0 ? json() : json(call.sequence)},
              {"bytes", call.bytes},
              {"dtype", call.dtype},
              {"shape", call.shape},
              {"under_way", call.under_way()},
              {"seconds", seconds((call.under_way() ? now : call.end_ns) - call.start_ns)}};
  if (call.peer >= 0) out["peer"] = call.peer;
  return out;
}

json rank_json(const trace::RankTrace& rank, std::int64_t now) {
  const auto rates = trace::rates_of(rank, now, kRateWindow);
  const bool gone = !trace::is_open(rank.life);
  const trace::Record* const latest = rank.latest();
  const trace::Record* const waits = in_flight(rank);
  json out = {{"rank", rank.rank},
              {"host", rank.host},
              {"pid", rank.pid},
              {"process", trace::name_of(rank.life)},
              {"wait", gone ? 0 : rates.busy},
              {"calls_per_second", gone ? 0 : rates.operations},
              {"bytes_per_second", gone ? 0 : rates.bytes},
              {"calls", rank.calls},
              {"failures", rank.failures},
              {"last_error", rank.failures == 0 ? json() : json(rank.failure)},
              {"last_call", latest == nullptr ? json() : call_json(*latest, rank, now)},
              {"in_flight", waits == nullptr ? json() : call_json(*waits, rank, now)}};
  return out;
}

}  // namespace

json report_of(const trace::JobTrace& job, const std::vector<std::string>& notes) {
  const std::int64_t now = job.now_ns();
  const auto holdups = trace::find_holdups(job);
  json ranks = json::array(), behind = json::array();
  for (const auto& rank : job.ranks) ranks.push_back(rank_json(rank, now));
  for (const auto& each : holdups)
    behind.push_back({{"group", each.group},
                      {"sequence", each.sequence},
                      {"call", each.call},
                      {"reason", name_of(each.reason)},
                      {"behind", each.behind},
                      {"waiting", each.waiting},
                      {"seconds", seconds(now - each.since_ns)},
                      {"usual", each.usual}});
  const bool any = !job.ranks.empty();
  return {{"job", any ? json(job.ranks.front().job) : json()},
          {"run_id", any ? json(job.ranks.front().run_id) : json()},
          {"world_size", job.world_size()},
          {"headline", trace::headline(job, holdups)},
          {"holdups", behind},
          {"ranks", ranks},
          {"unread", job.unread},
          {"notes", notes}};
}

std::string report_json(const trace::JobTrace& job, const std::vector<std::string>& notes) {
  return json_line(report_of(job, notes));
}

}  // namespace muster::cli
