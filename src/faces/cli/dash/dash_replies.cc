// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/dash/dash_replies.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>

#include "faces/cli/dash/stacks.h"
#include "faces/cli/dash/timeline.h"
#include "faces/cli/json_line.h"
#include "faces/cli/trace.h"

namespace muster::cli {
namespace {

using nlohmann::json;

constexpr std::int64_t kTimelineSpan = 30'000'000'000;
constexpr int kMostColumns = 1200;         // limit: a browser's patience
constexpr std::size_t kCallsOfRank = 100;  // limit: a browser's patience
constexpr Duration kLogsStay = std::chrono::seconds(5);
constexpr int kIdleShareOfLogs = 9;  // of the time that looking for them takes

DashReply reply_of(const json& object, int status = 200) { return {status, json_line(object)}; }

DashReply refusal(int status, const std::string& why) { return reply_of({{"error", why}}, status); }

std::optional<int> whole_number(const DashQuery& query, const std::string& name) {
  const auto found = query.parameters.find(name);
  if (found == query.parameters.end()) return std::nullopt;
  const std::string& text = found->second;
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// The rank that is asked for, or null and the refusal.
const trace::RankTrace* rank_in(const DashLook& look, const DashQuery& query, DashReply& refused) {
  const auto number = whole_number(query, "rank");
  if (!number) {
    refused = refusal(400, "rank must be a whole number: " + query.path + "?rank=0");
    return nullptr;
  }
  const auto* rank = look.shown.job.rank(*number);
  if (rank == nullptr)
    refused = refusal(404, "nothing is known of rank " + std::to_string(*number));
  return rank;
}

}  // namespace

DashReply DashReplies::reply(const DashQuery& query) {
  const auto look = job_->latest();
  if (!look) return refusal(503, look.status().message());
  if (query.path == "/api/state") return state(**look);
  if (query.path == "/api/timeline") return timeline(**look, query);
  if (query.path == "/api/rank") return rank(**look, query);
  if (query.path == "/api/stacks") return stacks(**look, query);
  if (query.path == "/api/logs") return logs(**look);
  if (query.path == "/api/log") return log(**look, query);
  return refusal(404, "there is nothing called " + query.path);
}

DashReply DashReplies::state(const DashLook& look) const {
  json out = report_of(look.shown.job, look.shown.notes);
  const auto behind = nanoseconds_behind(look.shown.job, trace::find_holdups(look.shown.job));
  for (json& rank : out["ranks"]) {
    const auto found = behind.find(rank["rank"].get<int>());
    rank["behind_seconds"] = found == behind.end() ? 0 : static_cast<double>(found->second) * 1e-9;
  }
  EventsOfJob events = read_events(places_.events);
  for (const json& each : look.replaced) events.events.push_back(each);
  if (!events.problem.empty()) out["notes"].push_back(events.problem);
  out["over"] = look.over;
  out["lost"] = look.lost;
  out["epoch"] = events.epoch < 0 ? json() : json(events.epoch);
  out["restarts"] = events.restarts < 0 ? json() : json(events.restarts);
  out["events"] = std::move(events.events);
  out["has_logs"] = !places_.logs.empty();
  return reply_of(out);
}

DashReply DashReplies::timeline(const DashLook& look, const DashQuery& query) const {
  const int columns = whole_number(query, "columns").value_or(300);
  if (columns < 1 || columns > kMostColumns)
    return refusal(400, "columns must be from 1 to " + std::to_string(kMostColumns));
  const std::int64_t now = look.shown.job.now_ns();
  const TimelineSpan span{now - kTimelineSpan, now, columns};
  json ranks = json::array();
  for (const auto& rank : look.shown.job.ranks)
    ranks.push_back({{"rank", rank.rank}, {"columns", timeline_columns(rank, span, now)}});
  return reply_of(
      {{"begin_ns", span.begin_ns}, {"end_ns", span.end_ns}, {"ranks", std::move(ranks)}});
}

DashReply DashReplies::rank(const DashLook& look, const DashQuery& query) const {
  DashReply refused;
  const auto* rank = rank_in(look, query, refused);
  if (rank == nullptr) return refused;
  const std::int64_t now = look.shown.job.now_ns();
  json calls = json::array();
  const std::size_t first = rank->records.size() - std::min(rank->records.size(), kCallsOfRank);
  for (std::size_t at = rank->records.size(); at > first; --at)
    calls.push_back(trace::describe(rank->records[at - 1], *rank, now, true));
  return reply_of({{"rank", rank->rank},
                   {"host", rank->host},
                   {"pid", rank->pid},
                   {"process", trace::name_of(rank->life)},
                   {"made", rank->calls},
                   {"calls", std::move(calls)},
                   {"failures", rank->failures},
                   {"failure", rank->failure}});
}

DashReply DashReplies::stacks(const DashLook& look, const DashQuery& query) {
  DashReply refused;
  const auto* rank = rank_in(look, query, refused);
  if (rank == nullptr) return refused;
  const std::unique_lock lock(debugging_, std::try_to_lock);
  if (!lock) return refusal(503, "another rank's stacks are being read; try again");
  const RankStacks read = stacks_of(*rank, whole_number(query, "native").value_or(0) == 1);
  json sections = json::array();
  for (const auto& [source, text] : read.sections)
    sections.push_back({{"source", source}, {"text", text}});
  return reply_of({{"rank", rank->rank}, {"sections", std::move(sections)}, {"notes", read.notes}});
}

/// Those who follow a log ask every second, and looking for them opens many folders.
std::vector<LogOfJob> DashReplies::known_logs(const DashLook& look) {
  const std::lock_guard lock(listing_);
  if (steady_clock().now() >= logs_until_) {
    const TimePoint begun = steady_clock().now();
    logs_ = find_logs(places_.logs, look.shown.job);
    const Duration took = steady_clock().now() - begun;
    logs_until_ = deadline_after(steady_clock(), std::max(kLogsStay, kIdleShareOfLogs * took));
  }
  return logs_;
}

DashReply DashReplies::logs(const DashLook& look) {
  json out = json::array();
  for (const LogOfJob& each : known_logs(look))
    out.push_back({{"name", each.name}, {"bytes", each.bytes}});
  return reply_of({{"logs", std::move(out)}});
}

DashReply DashReplies::log(const DashLook& look, const DashQuery& query) {
  const auto name = query.parameters.find("name");
  if (name == query.parameters.end()) return refusal(400, "name must be given: /api/log?name=...");
  const auto tail = tail_of_log(known_logs(look), name->second);
  if (!tail) return refusal(404, tail.status().message());
  return reply_of({{"name", name->second}, {"bytes", tail->bytes}, {"text", tail->text}});
}

}  // namespace muster::cli
