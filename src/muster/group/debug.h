/// Finding out what goes wrong in a job: a barrier that names who is missing, debug levels, a
/// breakpoint on one rank, timeouts and aborts.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "muster/base/clock.h"
#include "muster/base/debug_level.h"
#include "muster/group/process_group.h"

namespace muster {

struct MonitoredBarrierOptions {
  Group group = nullptr;
  std::optional<Duration> timeout = {};  ///< absent: the group's
  bool wait_all_ranks = false;  ///< rank 0 names every rank that is missing, not only the first
};
/// Returns once all members have come. Otherwise rank 0 of the group throws DistBackendError with
/// torch's text, "Rank 1 failed to pass monitoredBarrier in 2000 ms", and what it saw ("Original
/// exception:"); `ranks()` are those missing, as ranks of the default group (before any shrinking).
/// All others fail with its verdict, those that come too late as well; they wait for it a little
/// beyond the timeout. The group stays usable. On every backend: where none of the group's can
/// carry messages of CPU tensors it goes through the job's store. A process that is no member
/// returns at once.
void monitored_barrier(const MonitoredBarrierOptions& options = {});

/// What TORCH_DISTRIBUTED_DEBUG says now; DistError where it says none of OFF, INFO and DETAIL.
/// `set_debug_level` and `get_debug_level` are in base/debug_level.h.
void set_debug_level_from_env();

/// All ranks of the default group call it: `rank` stops for a debugger, the others wait without
/// limit until it goes on. Meanwhile no rank of the job counts as dead for being silent. Calls
/// under way on other groups and threads keep the deadlines that they began with: give those groups
/// a long timeout (`set_timeout`) before the calls that may be caught by it.
void breakpoint(int rank = 0);
/// What stopping is, on the rank that does: at first SIGTRAP where a debugger is attached to the
/// process, else SIGSTOP, after a line in the log that says how to attach one. Returns what it was.
/// Thread-safe.
std::function<void()> set_breakpoint_hook(std::function<void()> hook);

/// The timeout of the group's later calls that name none; those under way keep theirs. This process
/// only.
void set_timeout(Duration timeout, const Group& group = nullptr);
/// Ends everything in flight on the group and tells the other members, whose calls fail too, naming
/// this rank and the reason. What comes later on the group fails in the same way;
/// destroy_process_group is still due.
void abort_process_group(const Group& group = nullptr,
                         const std::string& reason = "abort_process_group was called");

}  // namespace muster
