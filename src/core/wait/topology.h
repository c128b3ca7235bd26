// SPDX-License-Identifier: BSD-3-Clause
/// The hardware threads and cores of this host that the process may use, and how many ranks share
/// each core.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "muster/clock.h"
#include "muster/status.h"

namespace muster {

/// The hardware threads that the calling thread may run on, by the system's numbers, in order; none
/// where the system does not tell.
std::vector<int> own_hardware_threads();

/// From now on the calling thread, and what it starts, runs there alone. Fails, and leaves it where
/// it may run now, where there is no such hardware thread or this process may not have it.
Status bind_to_hardware_thread(int number);

/// The cores in this process's affinity mask, ascending. Each core is named by its first hardware
/// thread: two hardware threads of one core do not count twice, because they compete for the same
/// units. If the system does not report siblings, every hardware thread counts as a core. `root`:
/// prefix of /proc and /sys, for tests.
std::vector<int> own_cores(const std::string& root = "");

/// The CPU limit of this process's control groups (v1 and v2), in CPUs. 0: unlimited.
double cpu_quota(const std::string& root = "");

/// The number of `cores` that can be kept busy within a quota: at least 1. Fractions of a core are
/// dropped, since a rank cannot spin on them.
int cores_within(std::size_t cores, double quota);
/// For this process alone; read once.
int usable_cores();

/// Ranks of one host divided by its `cores` (at least 1), rounded up. 1 means that every rank has
/// its own core.
inline int ranks_per_core(std::size_t ranks, int cores) {
  const auto count = static_cast<std::size_t>(cores);
  return static_cast<int>((ranks + count - 1) / count);
}

/// How the ranks of one host share its cores.
struct Topology {
  int cores = 1;
  int ranks_per_core = 1;  ///< rounded up

  Topology() = default;
  Topology(std::size_t ranks, int usable)
      : cores(usable), ranks_per_core(muster::ranks_per_core(ranks, usable)) {}

  /// Every rank has a core of its own and may spin on it.
  bool dedicated() const { return ranks_per_core == 1; }
  bool oversubscribed() const { return ranks_per_core > 1; }
  /// `once` times the number of ranks per core, capped at 8. A thread that yields its core gets it
  /// back within this time, and the cap keeps the wait below the point at which a rank counts as
  /// late.
  Duration rounds(Duration once) const { return once * std::clamp(ranks_per_core, 1, 8); }
};

}  // namespace muster
