// SPDX-License-Identifier: BSD-3-Clause
/// The log files of a job's workers: those in the launcher's folder (`--log-dir`), and files that
/// live ranks of this host have as their standard output and error.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/trace/analysis.h"
#include "faces/cli/dash/file_tail.h"

namespace muster::cli {

struct LogOfJob {
  std::string name;  ///< "attempt_0/3/stderr.log", or "rank 3 stdout"
  std::string path;
  std::uint64_t bytes = 0;
};

/// By name; at most 4,096, of the first 65,536 entries of the folder. `folder` may be empty.
std::vector<LogOfJob> find_logs(const std::string& folder, const trace::JobTrace& job);

/// The last 64 KiB, in characters that can be shown. Code::invalid_argument where `logs` has none
/// of this name: no other file can be read so.
Result<FileTail> tail_of_log(const std::vector<LogOfJob>& logs, const std::string& name);

}  // namespace muster::cli
