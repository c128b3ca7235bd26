// SPDX-License-Identifier: BSD-3-Clause
/// The launcher's final report, for the person who wants to know why a job has stopped, and the
/// error files of workers, which it quotes: torch's `@record` writes an exception as JSON to the
/// path in TORCHELASTIC_ERROR_FILE.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "jobs/launch/launcher_machine.h"
#include "jobs/launch/node/rank_assignment.h"

namespace muster::launch {

struct WorkerError {
  std::string message;  ///< "ValueError: no such file"
  std::string stack;    ///< lines of the traceback; may be empty
};

/// Parses the text of such a file, in either form that torch has used; empty if it is invalid.
std::optional<WorkerError> parse_error_file(std::string_view text);
/// Reads and parses the file, at most 1 MiB of it; empty if it does not exist.
std::optional<WorkerError> read_error_file(const std::string& path);

/// Facts of a worker besides how it ended.
struct WorkerRecord {
  pid_t pid = -1;
  std::chrono::system_clock::time_point started{}, ended{};
  std::string start_error;    ///< why it never ran; empty if it did
  std::string error_file{};   ///< where it may leave its exception
  int attempt = 0;            ///< in which it was started
  std::string memory_kill{};  ///< that the kernel has killed for want of memory; usually empty
};

struct ReportFacts {
  std::string command{};  ///< "muster run"
  std::string host{};
  std::vector<WorkerRanks> ranks{};
  std::vector<WorkerRecord> workers{};
  std::string tail{};                   ///< of the first failure's standard error
  std::string advice{};                 ///< derived from `tail`; usually empty
  std::string log_folder{};             ///< empty: nothing was redirected
  std::vector<std::string> failures{};  ///< of all nodes and epochs, in order
  WorkerError error{};                  ///< of the first failure's error file; empty: it left none
  /// Directory of the last calls of this node's ranks; empty: they have left none.
  std::string traces{};
};

/// The folder of the last calls of the job's ranks, found by a worker's pid, or by the job's name
/// if the worker only started the program that is a rank. Empty: there is none.
std::string find_traces(const std::vector<WorkerRecord>& workers, const std::string& run_id);

/// "rank 1 (local rank 1, process 77, host h) ended with exit code 3".
std::string describe_end(const WorkerEnd& end, const ReportFacts& facts);
/// Describes the first failure; empty if no worker failed.
std::string first_failure_line(const LauncherState& state, const ReportFacts& facts);
/// The whole report; empty if all workers succeeded.
std::string failure_report(const LauncherState& state, const ReportFacts& facts);

}  // namespace muster::launch
