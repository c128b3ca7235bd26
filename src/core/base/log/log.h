// SPDX-License-Identifier: BSD-3-Clause
/// The log. Nothing but `log.cc` sees the library behind it (torch bundles another version's
/// headers). Level from `MUSTER_LOG_LEVEL` (error, warning, info, debug, trace), else from
/// `TORCH_DISTRIBUTED_DEBUG` and `TORCH_CPP_LOG_LEVEL` as torch documents them, else warning. Lines
/// go to standard error with time, level and rank, or with date, host and process too to the file
/// of `MUSTER_LOG_FILE` (`log_file.h`); as JSON with `MUSTER_LOG_FORMAT=json` (`log_format.h`).
///
/// Logging never waits for the reader of standard error, so it is allowed under any lock: while
/// that is full, up to 1 MiB of lines waits for a thread of its own to write them, and later ones
/// are counted. A process that ends writes what waits, unless standard error is not read for 2 s.
/// Standard error that is a regular file is written at once.
#pragma once

#include <string_view>

#include "muster/debug_level.h"
#include "muster/status.h"

namespace muster {

enum class LogLevel { error, warning, info, debug, trace };

LogLevel log_level();
void set_log_level(LogLevel level);
/// Shown in every line of this thread from now on; -1 shows none. Threads of one rank share it by
/// saying it.
void set_log_rank(int rank);
void log(LogLevel level, std::string_view message);
/// For a process that must not wait for the disk of a log file either: a thread writes all lines
/// from now on. The last ones are lost if the process is killed.
void log_by_thread();
inline bool logs(LogLevel level) { return level <= log_level(); }

// TORCH_DISTRIBUTED_DEBUG, and the log level that it gives together with TORCH_CPP_LOG_LEVEL.

/// OFF, INFO, DETAIL in any case, OFF where it is not set; anything else is Code::invalid_argument
/// naming the variable.
Result<DebugLevel> debug_level_from_environment();
/// The documents' table: ERROR, WARNING (the default) and INFO give error, warning, info; INFO with
/// debug level INFO gives debug, with DETAIL trace. FATAL counts as ERROR; the numbers 0 to 3 stand
/// for INFO to FATAL.
LogLevel log_level_for(std::string_view cpp_log_level, DebugLevel debug);
/// From MUSTER_LOG_LEVEL, else as `log_level_for` says.
LogLevel log_level_from_environment();

}  // namespace muster
