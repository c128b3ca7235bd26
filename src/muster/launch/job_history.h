/// What has happened to a job so far: the failures of all nodes, for the last report, and the same
/// as JSON lines for programs (`--events`, `--event-log-handler`).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "muster/base/temporary_folder.h"
#include "muster/launch/error_file.h"
#include "muster/launch/event_log.h"
#include "muster/launch/node_membership.h"
#include "muster/launch/options.h"
#include "muster/launch/process.h"
#include "muster/launch/rank_assignment.h"

namespace muster::launch {

class JobHistory {
 public:
  /// Opens what the options ask for.
  Status open(const RunOptions& options, const std::string& job, const std::string& host);

  /// Where the worker of an attempt may leave its exception (TORCHELASTIC_ERROR_FILE); empty:
  /// nowhere. The files go with this object.
  std::string error_file(int local_rank, int attempt) const;

  struct OwnFailure {
    std::int64_t epoch = 0;
    int attempt = 0;
    int slot = 0;
    WorkerRanks ranks;
    pid_t pid = -1;
    ProcessExit exit;
    std::string text;  ///< who, where and how
    std::string log;   ///< its standard error; empty: it is kept nowhere
  };
  /// A worker of this node; what the others are told.
  FailureNote note(const OwnFailure& failure);
  /// Workers of other nodes.
  void note(const std::vector<FailureNote>& failures);
  void begin(const EpochPlan& plan, int world_size);
  void end(int exit_code, const std::string& reason);

  /// In the order in which they became known.
  const std::vector<std::string>& failures() const { return failures_; }

 private:
  void write(const std::string& event, const std::vector<EventLog::Field>& fields) const;

  const TemporaryFolder errors_{"muster-errors-"};
  std::vector<EventLog> logs_;
  std::vector<std::string> failures_;
  std::int64_t own_ = 0;
};

}  // namespace muster::launch
