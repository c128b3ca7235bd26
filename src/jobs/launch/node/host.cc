#include "jobs/launch/node/host.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "core/net/host_name.h"
#include "core/wait/hardware_threads.h"
#include "core/wait/topology.h"

namespace muster::launch {
int allowed_cores() {
  int cores = static_cast<int>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
  if (const auto threads = own_hardware_threads(); !threads.empty())
    cores = static_cast<int>(threads.size());
  const double quota = cpu_quota();
  if (quota > 0) cores = std::min(cores, static_cast<int>(std::ceil(quota)));
  return std::max(1, cores);
}

int gpu_count() {
  int count = 0;
  while (::access(("/dev/nvidia" + std::to_string(count)).c_str(), F_OK) == 0) ++count;
  const char* visible = ::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return count;
  const std::string list = visible;
  if (list.empty() || list == "-1") return 0;
  return std::min(count, static_cast<int>(std::count(list.begin(), list.end(), ',')) + 1);
}

std::string full_host_name() { return muster::full_host_name(); }

std::string own_program() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).string();
}

}  // namespace muster::launch
