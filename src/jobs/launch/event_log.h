/// The events of a job as JSON lines, for programs that watch it.
///
///   {"time": "2026-11-27T08:00:00.123Z", "event": "worker_failed", "job": "job7",
///    "host": "node0", "epoch": 2, "rank": 3, ...}
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/log/queued_writer.h"
#include "muster/status.h"

namespace muster::launch {

/// Lines wait in a bounded queue for a thread of the log's own: a disk that hangs and a pipe that
/// nobody reads hold nobody up. Lines that find the queue full are dropped, and an event
/// "events_dropped" with their "count" is written in their place. Used by one thread.
class EventLog {
 public:
  using Field = std::pair<std::string, std::variant<std::int64_t, std::string>>;

  /// Appends to the file, which is created with mode 0600 if missing; refused where others could
  /// have laid it (`core/security/own_files.h`). Every line has `job` and `host`.
  static Result<EventLog> open(const std::string& path, std::string job, std::string host);
  /// Writes to a descriptor that others use too (standard error). `name`: for messages.
  static EventLog to(Descriptor descriptor, std::string name, std::string job, std::string host);

  EventLog(EventLog&&) noexcept = default;
  EventLog& operator=(EventLog&&) noexcept = delete;
  /// Waits for what is queued, but at most two seconds for the next bytes to be taken, and ten in
  /// all. Says how many lines were not.
  ~EventLog();

  /// Adds one line. Never waits. If writing fails (no space), the log says so, and the line, or
  /// the rest of one that is torn, is put again with the next one.
  void write(const std::string& event, const std::vector<Field>& fields);

 private:
  struct Origin {
    std::string name, job, host;
    std::string line_of(const std::string& event, const std::vector<Field>& fields) const;
  };
  EventLog(Origin origin, Descriptor file);

  Origin origin_;
  std::unique_ptr<QueuedWriter> writer_;
};

}  // namespace muster::launch
