// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/dash/job_events.h"

#include <algorithm>
#include <sstream>

#include "faces/cli/dash/file_tail.h"

namespace muster::cli {
namespace {

constexpr std::size_t kMostEvents = 1000;  // limit: memory, and a browser's patience
constexpr std::size_t kMostEventBytes = std::size_t{4} << 20;  // limit: memory
constexpr int kDeepestValue = 16;  // limit: the stack of those who write it again

void keep_last(nlohmann::json& events) {
  if (events.size() <= kMostEvents) return;
  const auto surplus = static_cast<std::ptrdiff_t>(events.size() - kMostEvents);
  events.erase(events.begin(), events.begin() + surplus);
}

std::int64_t number_in(const nlohmann::json& event, const char* name, std::int64_t otherwise) {
  const auto found = event.find(name);
  return found != event.end() && found->is_number_integer() ? found->get<std::int64_t>()
                                                            : otherwise;
}

}  // namespace

EventsOfJob read_events(const std::string& path) {
  EventsOfJob read;
  if (path.empty()) return read;
  const auto tail = tail_of_file(path, "the file of events", kMostEventBytes);
  if (!tail) {
    read.problem = tail.status().message();
    return read;
  }
  std::istringstream lines(tail->text);
  for (std::string line; std::getline(lines, line);) {
    nlohmann::json event = nlohmann::json::parse(
        line, [](int depth, auto, const auto&) { return depth < kDeepestValue; }, false);
    // The first line may be cut, the last may be being written.
    if (!event.is_object() || !event.contains("event")) continue;
    if (event["event"] == "workers_started") {
      read.epoch = std::max(read.epoch, number_in(event, "epoch", -1));
      read.restarts = std::max(read.restarts, number_in(event, "restarts", -1));
    }
    read.events.push_back(std::move(event));
  }
  keep_last(read.events);
  return read;
}

void ReplacedRanks::look(const trace::JobTrace& job) {
  for (const auto& rank : job.ranks) {
    const auto [known, is_new] = pids_.emplace(rank.rank, rank.pid);
    if (is_new || known->second == rank.pid) continue;
    events_.push_back({{"time_ns", rank.since_ns},
                       {"event", "rank_replaced"},
                       {"rank", rank.rank},
                       {"pid", rank.pid},
                       {"what", "process " + std::to_string(rank.pid) + " has taken the place of " +
                                    std::to_string(known->second)}});
    known->second = rank.pid;
  }
  keep_last(events_);
}

}  // namespace muster::cli
