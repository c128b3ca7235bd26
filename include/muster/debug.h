// SPDX-License-Identifier: BSD-3-Clause
/// Debugging a job: a barrier that names missing ranks, debug levels, a breakpoint on one rank,
/// timeouts and aborts.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "muster/clock.h"
#include "muster/debug_level.h"
#include "muster/process_group.h"

namespace muster {

struct MonitoredBarrierOptions {
  Group group = nullptr;
  std::optional<Duration> timeout = {};  ///< default: the group's
  bool wait_all_ranks = false;  ///< true: rank 0 names every missing rank, not only the first
};
/// Returns once all members have arrived. Otherwise, group rank 0 throws DistBackendError with
/// torch's text, "Rank 1 failed to pass monitoredBarrier in 2000 ms", and the error it saw
/// ("Original exception:"); `ranks()` are the missing ranks of the default group (before any
/// shrinking). Every other member fails with rank 0's verdict, even one that arrives late. After
/// rank 0 has arrived, members wait for its verdict for the timeout plus 10 s. The group stays
/// usable. Works on every backend: if none of the group's backends carries messages of CPU tensors,
/// the barrier uses the job's store. Returns immediately on a non-member.
void monitored_barrier(const MonitoredBarrierOptions& options = {});

/// Sets the debug level from TORCH_DISTRIBUTED_DEBUG. Throws DistError if it is not OFF, INFO or
/// DETAIL. `set_debug_level` and `get_debug_level` are in muster/debug_level.h.
void set_debug_level_from_env();

/// Stops `rank` for a debugger. All ranks of the default group call it; the others wait without
/// limit until `rank` continues. During that time no silent rank of the job is declared dead. Calls
/// in flight on other groups and threads keep their deadlines; give those groups a long timeout
/// (`set_timeout`) beforehand.
void breakpoint(int rank = 0);
/// Sets the function that stops the rank and returns the previous one. The default raises SIGTRAP
/// if a debugger is attached to the process; otherwise it logs how to attach one and raises
/// SIGSTOP. Thread-safe.
std::function<void()> set_breakpoint_hook(std::function<void()> hook);

/// Sets the timeout of the group's later calls that give none, in this process only. Calls in
/// flight keep theirs.
void set_timeout(Duration timeout, const Group& group = nullptr);
/// Aborts everything in flight on the group. The other members' calls fail too, with an error that
/// names this rank and the reason. Later calls on the group fail in the same way.
/// destroy_process_group must still be called.
void abort_process_group(const Group& group = nullptr,
                         const std::string& reason = "abort_process_group was called");

}  // namespace muster
