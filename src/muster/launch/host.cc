#include "muster/launch/host.h"

#include <netdb.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "muster/base/env.h"

namespace muster::launch {
namespace {

std::string first_line(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

double quota_v1(const std::filesystem::path& folder) {
  const std::string quota = first_line(folder / "cpu.cfs_quota_us");
  const std::string period = first_line(folder / "cpu.cfs_period_us");
  return quota.empty() || period.empty() ? 0 : quota_of_cpu_max(quota + " " + period);
}

void keep_smaller(double& least, double quota) {
  if (quota > 0 && (least == 0 || quota < least)) least = quota;
}

// The smallest quota on the way from our control group to the root.
double control_group_quota() {
  double least = 0;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool unified = controllers.empty();
    if (!unified && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    const std::filesystem::path root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
    std::filesystem::path inside = std::filesystem::path(line.substr(second + 1)).relative_path();
    for (;; inside = inside.parent_path()) {
      keep_smaller(least, unified ? quota_of_cpu_max(first_line(root / inside / "cpu.max")) : quota_v1(root / inside));
      if (inside.empty()) break;
    }
  }
  return least;
}

}  // namespace

double quota_of_cpu_max(const std::string& text) {
  std::istringstream words(text);
  double quota = 0, period = 0;
  if (!(words >> quota >> period) || quota <= 0 || period <= 0) return 0;
  return quota / period;
}

int allowed_cores() {
  int cores = static_cast<int>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) cores = CPU_COUNT(&set);
  const double quota = control_group_quota();
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

std::string full_host_name() {
  char name[HOST_NAME_MAX + 1] = {};
  if (::gethostname(name, sizeof name - 1) != 0 || name[0] == '\0') return "localhost";
  const std::string plain = name;
  if (plain.find('.') != std::string::npos) return plain;
  addrinfo hints{};
  hints.ai_flags = AI_CANONNAME;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(name, nullptr, &hints, &found) != 0) return plain;
  // A hosts file that calls everything "localhost" says nothing about this host.
  const std::string canonical = found->ai_canonname != nullptr ? found->ai_canonname : "";
  ::freeaddrinfo(found);
  return canonical.starts_with(plain + ".") ? canonical : plain;
}

}  // namespace muster::launch
