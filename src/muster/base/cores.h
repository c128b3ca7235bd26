/// What this process may compute on.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

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

}  // namespace muster
