/// The cores of this host that the process may use, and how many ranks share each of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "muster/base/clock.h"

namespace muster {

/// The cores of this process's affinity mask, in order, each named by its first hardware thread:
/// two threads of one core share what a rank that computes or spins needs. Where the system does
/// not tell, every hardware thread is a core. `root`: where /proc and /sys stand, for tests.
std::vector<int> own_cores(const std::string& root = "");

/// How many CPUs' time the control groups of this process allow it, versions 2 and 1; 0: as many as
/// there are.
double cpu_quota(const std::string& root = "");

/// So many of `cores` can be kept busy within a quota: at least 1. A part of a core is none to spin
/// on.
int cores_within(std::size_t cores, double quota);
/// For this process alone; read once.
int usable_cores();

/// Ranks of one host for each of its `cores` (at least 1), rounded up: 1 where every rank has a
/// core.
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

  /// Every rank has a core of its own and may spin there.
  bool dedicated() const { return ranks_per_core == 1; }
  bool oversubscribed() const { return ranks_per_core > 1; }
  /// `once` for each rank that shares a core, at most eight: a thread that gives its core away
  /// sees all of them come round in that time, and stays below what counts as late.
  Duration rounds(Duration once) const { return once * std::clamp(ranks_per_core, 1, 8); }
};

}  // namespace muster
