// SPDX-License-Identifier: BSD-3-Clause
/// The launcher: starts a node's workers, watches them, shows their output and forwards signals.
/// `launcher_machine.h` decides what to do.
#pragma once

#include "jobs/launch/options.h"

namespace muster::launch {

/// Runs this node's part of the job, from the rendezvous to the report. Returns the exit code for
/// the process: 0 on success; the first failed worker's exit code (128 + signal if a signal ended
/// it); 128 + signal if a signal stopped the launcher; 1 if the job could not be started. `options`
/// must be valid (`validate`). Call it from the main thread of a process that does nothing else: it
/// takes over signals, and its workers die with that thread.
int run_job(const RunOptions& options);

}  // namespace muster::launch
