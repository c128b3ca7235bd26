/// This machine's resources for workers, and its name.
#pragma once

#include <string>

namespace muster::launch {

/// Number of cores that this process may use: its affinity mask, limited by the CPU quota of its
/// control group (v2 and v1), rounded up, at least 1.
int allowed_cores();
/// Number of NVIDIA devices (/dev/nvidia0 ...), limited by CUDA_VISIBLE_DEVICES.
int gpu_count();
/// Host name, with the domain if the resolver knows one.
std::string full_host_name();
/// The path of the running program.
std::string own_program();

}  // namespace muster::launch
