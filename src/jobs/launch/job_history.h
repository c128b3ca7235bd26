/// What has happened to a job so far: the failures of all nodes, for the last report, and the same
/// as JSON lines for programs (`--events`, `--event-log-handler`).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/base/process/temporary_folder.h"
#include "jobs/launch/event_log.h"
#include "jobs/launch/node/node_membership.h"
#include "jobs/launch/node/rank_assignment.h"
#include "jobs/launch/options.h"
#include "jobs/launch/workers/error_file.h"
#include "jobs/launch/workers/process.h"

namespace muster::launch {

class JobHistory {
 public:
  /// Opens the event logs that the options name.
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
  void end(int exit_code, const std::string& reason);

  /// In the order in which they became known.
  const std::vector<std::string>& failures() const { return failures_; }

 private:
  void write(const std::string& event, const std::vector<EventLog::Field>& fields);

  const TemporaryFolder errors_{"muster-errors-"};
  std::vector<EventLog> logs_;
  std::vector<std::string> failures_;
  std::int64_t own_ = 0;
};

}  // namespace muster::launch
