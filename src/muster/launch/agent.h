/// The agent: starts a node's workers, watches them, shows their output, passes signals on. What to
/// do is `agent_machine.h`'s to say.
#pragma once

#include "muster/launch/options.h"

namespace muster::launch {

/// Runs the job's part on this node, from the rendezvous to the report, and returns the exit code
/// for the process: 0, the first failed worker's (128 + signal where one ended it), 128 + signal
/// where a signal stopped us, 1 where the job could not be started. `options` must be valid
/// (`validate`). Call it from the main thread of a process that does nothing else: it takes over
/// signals, and its workers die with that thread.
int run_job(const RunOptions& options);

}  // namespace muster::launch
