/// What happens to a job, one JSON object a line: for programs that watch it.
///
///   {"time": "2026-11-27T08:00:00.123Z", "event": "worker_failed", "job": "job7",
///    "host": "node0", "epoch": 2, "rank": 3, ...}
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "muster/base/descriptor.h"
#include "muster/status.h"

namespace muster::launch {

class EventLog {
 public:
  using Field = std::pair<std::string, std::variant<std::int64_t, std::string>>;

  /// Of nothing: `write` does nothing.
  EventLog() = default;
  /// Appends to the file, which is made for this user alone if it is not there. `job` and `host`
  /// stand in every line.
  static Result<EventLog> open(const std::string& path, std::string job, std::string host);
  /// Writes to a descriptor that others use too (standard error).
  static EventLog to(Descriptor descriptor, std::string job, std::string host);

  /// One line, written at once. A disk that is full loses it.
  void write(const std::string& event, const std::vector<Field>& fields) const;

 private:
  Descriptor file_;
  std::string job_, host_;
};

}  // namespace muster::launch
