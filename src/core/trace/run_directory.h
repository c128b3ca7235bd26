// SPDX-License-Identifier: BSD-3-Clause
/// The location of this user's traces: one directory per job below `$MUSTER_RUN_DIR`, else
/// `$XDG_RUNTIME_DIR/muster`, else `/tmp/muster-<uid>`, with a file `rank<r>.trace` per rank.
///
/// Every directory must belong to this user and be closed to writing by others (a job's own: to
/// everything); symbolic links are not followed. A live rank holds a lock (flock) on its file,
/// which distinguishes live ranks from dead ones.
#pragma once

#include <string>
#include <vector>

#include "core/base/descriptor.h"
#include "muster/status.h"

namespace muster::trace {

std::string run_directory();
/// The name of a job's directory below it: at most 128 plain characters.
std::string job_folder(const std::string& job);
std::string trace_name(int rank);

/// Makes (both levels) where it is missing; the descriptor is the job's directory. The first rank
/// there prunes the others'.
Result<Descriptor> open_job_directory(const std::string& base, const std::string& folder);

/// Removes the traces of jobs none of whose ranks lives: those untouched for three days, and all
/// but the latest 64. Never a live rank's, and nothing but traces.
void prune(const std::string& base);

/// Whether a rank of a live process holds this trace open.
bool is_live(int trace_file);

struct JobDirectory {
  std::string path;
  std::int64_t changed_ns = 0;  ///< wall clock
};
/// The jobs below `base`, latest first.
std::vector<JobDirectory> list_jobs(const std::string& base);

}  // namespace muster::trace
