// SPDX-License-Identifier: BSD-3-Clause
/// `muster run --bind-to`: which hardware threads each worker of a node may run on, by hwloc.
#pragma once

#include <string>
#include <vector>

#include "jobs/launch/options.h"
#include "muster/status.h"

namespace muster::cli {

/// By local rank; none for "none". Divides what this process may use: "core" gives each worker its
/// own cores, as many as each can have, next to each other; "numa" gives it all cores of a NUMA
/// node, and the nodes an equal number of workers. `synthetic`: a machine as hwloc describes it
/// ("numa:2 core:4 pu:2") instead of this one, for tests.
Result<std::vector<launch::WorkerCpus>> bind_workers(const std::string& to, int workers,
                                                     const std::string& synthetic = {});

/// The word for --bind-to that torchrun's --numa-binding stands for, or `bind_to` if that is empty.
Result<std::string> binding_of(const std::string& bind_to, const std::string& numa_binding);

}  // namespace muster::cli
