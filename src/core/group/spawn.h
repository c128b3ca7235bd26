// SPDX-License-Identifier: BSD-3-Clause
/// The seam by which a layer above this one starts the processes of muster::spawn.
#pragma once

#include <functional>
#include <memory>

#include "muster/spawn.h"

namespace muster::group {

/// Forks `count` processes that run `body(rank)`. They have `shutdown_timeout` between SIGTERM and
/// SIGKILL when another one has failed.
using ProcessSpawner = std::unique_ptr<SpawnContext> (*)(
    int count, const std::function<Status(int rank)>& body, Duration shutdown_timeout);
/// Called before main by the layer that has one, in programs that link it.
void set_process_spawner(ProcessSpawner spawner);

}  // namespace muster::group
