/// What this machine offers to workers, and what it is called.
#pragma once

#include <string>

namespace muster::launch {

/// Cores that this process may use: its affinity mask, cut by the CPU quota of its control group
/// (v2 and v1), rounded up, at least 1.
int allowed_cores();
/// NVIDIA devices that the kernel shows (/dev/nvidia0 ...), cut by CUDA_VISIBLE_DEVICES.
int gpu_count();
/// Host name with domain where the resolver knows one.
std::string full_host_name();
/// The path of the program that runs.
std::string own_program();

}  // namespace muster::launch
