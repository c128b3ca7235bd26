// SPDX-License-Identifier: BSD-3-Clause
/// The socket over which a worker that stays through the epochs of its job hears from its launcher
/// (`jobs/launch/workers/worker_notices.h`). Any worker may have it, so every program that joins a
/// job keeps it from the programs that it starts: the launcher must see the worker's end.
#pragma once

namespace muster {

/// The variable with the number of the worker's descriptor.
inline constexpr const char* kLauncherSocketVariable = "MUSTER_LAUNCHER_NEWS";

/// Whether `descriptor` is a worker's end: a child of the worker may have something else there.
bool is_launcher_socket(int descriptor);
/// Makes the descriptor of the environment close-on-exec, if it is a worker's end. Call as early as
/// possible.
void keep_launcher_socket_from_programs();

}  // namespace muster
