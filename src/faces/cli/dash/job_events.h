// SPDX-License-Identifier: BSD-3-Clause
/// What has happened to a job besides calls: starts of workers, failures, its end. Read from the
/// launcher's file (`muster run --events FILE`), and seen by comparing looks at the ranks.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "core/trace/analysis.h"

namespace muster::cli {

struct EventsOfJob {
  nlohmann::json events = nlohmann::json::array();  ///< objects as they are in the file, in order
  std::int64_t epoch = -1;     ///< of the workers started last; -1: nobody has said
  std::int64_t restarts = -1;  ///< of the job; -1: nobody has said
  std::string problem;         ///< why the file cannot be read; empty: it can, or none was named
};

/// The last 1,000 events of the last 4 MiB of the file.
EventsOfJob read_events(const std::string& path);

/// Notes processes that have taken the place of others, for jobs without a file of events.
class ReplacedRanks {
 public:
  void look(const trace::JobTrace& job);
  /// Objects with `time_ns`, `event` ("rank_replaced"), `rank`, `pid`; at most 1,000.
  const nlohmann::json& events() const { return events_; }

 private:
  std::map<int, std::int64_t> pids_;
  nlohmann::json events_ = nlohmann::json::array();
};

}  // namespace muster::cli
