// SPDX-License-Identifier: BSD-3-Clause
/// The history of a job so far: the failures of all nodes, for the last report, and all events as
/// JSON lines for programs (`--events`, `--event-log-handler`):
///
///   {"time": "2026-11-27T08:00:00.123Z", "event": "worker_failed", "job": "job7",
///    "host": "node0", "epoch": 2, "rank": 3, ...}
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/log/queued_writer.h"
#include "core/base/process/temporary_folder.h"
#include "jobs/launch/node/node_membership.h"
#include "jobs/launch/node/rank_assignment.h"
#include "jobs/launch/node_numbers.h"
#include "jobs/launch/options.h"
#include "jobs/launch/report.h"
#include "jobs/launch/workers/process.h"
#include "jobs/launch/workers/worker_notices.h"
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

class JobHistory {
 public:
  /// Opens the event logs that the options name, and begins to keep their `numbers`.
  Status open(const RunOptions& options, const std::string& job, const std::string& host);

  /// Path for a worker's exception in this attempt (TORCHELASTIC_ERROR_FILE); empty: none. The
  /// files are removed with this object.
  std::string error_file(int local_rank, int attempt) const;

  struct OwnFailure {
    std::int64_t epoch = 0;
    int attempt = 0;
    int slot = 0;
    WorkerRanks ranks;
    pid_t pid = -1;
    ProcessExit exit;
    std::string text;  ///< which worker failed, on which host, and how
    std::string log;   ///< path of its standard error; empty: not kept
  };
  /// Records a failure on this node; returns the note for the other nodes.
  FailureNote note(const OwnFailure& failure);
  /// Records failures on other nodes.
  void note(const std::vector<FailureNote>& failures);
  void begin(const EpochPlan& plan, int restarts, int world_size);
  /// Records that at least so many commits are lost, as no rank of an epoch has them.
  void lose(std::int64_t epoch, std::int64_t commits, const std::string& text);
  /// Records that the group of an epoch has failed for a rank here, which lives.
  void trouble(const GroupTrouble& trouble, int rank);
  /// Records that the job stands still for nodes that may bring its state back.
  void wait(const StateWait& wait);
  void end(int exit_code, const std::string& reason);

  /// In the order in which they became known.
  const std::vector<std::string>& failures() const { return failures_; }
  /// The losses of state, also of a job that succeeds afterwards.
  const std::vector<std::string>& losses() const { return losses_; }

 private:
  void write(const std::string& event, const std::vector<EventLog::Field>& fields);

  const TemporaryFolder errors_{"muster-errors-"};
  std::vector<EventLog> logs_;
  std::shared_ptr<NodeNumbers> numbers_ = std::make_shared<NodeNumbers>();
  std::vector<std::string> failures_, losses_;
  std::int64_t own_ = 0;
};

}  // namespace muster::launch
