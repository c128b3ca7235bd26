/// The events of a job as JSON lines, for programs that watch it.
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

  /// A disabled log: `write` does nothing.
  EventLog() = default;
  /// Appends to the file, which is created with mode 0600 if missing; refused where others could
  /// have laid it (`base/own_files.h`). Every line has `job` and `host`.
  static Result<EventLog> open(const std::string& path, std::string job, std::string host);
  /// Writes to a descriptor that others use too (standard error).
  static EventLog to(Descriptor descriptor, std::string job, std::string host);

  /// Writes one line immediately. An error (no space) names the file; the line, and what was
  /// written before it of a line that is torn, is put again with the next one.
  Status write(const std::string& event, const std::vector<Field>& fields);

 private:
  Descriptor file_;
  std::string unwritten_;  // the end of what could not be written
  std::string job_, host_;
};

}  // namespace muster::launch
