#include "muster/transport/host_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

namespace muster::transport {
namespace {

constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

std::optional<std::size_t> number_in(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::size_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // not there, or "max"
}

/// The numbers behind some names, summed, of a file of lines "name number".
std::optional<std::size_t> field_of(const std::filesystem::path& path, std::initializer_list<const char*> names) {
  std::ifstream file(path);
  std::optional<std::size_t> sum;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    std::size_t value = 0;
    if (words >> name >> value && std::find(names.begin(), names.end(), name) != names.end()) sum = sum.value_or(0) + value;
  }
  return sum;
}

/// Our control group's folder below its mount; version 2, else the memory controller of version 1. Empty where there is none.
struct ControlGroup {
  std::filesystem::path mount, inside;
  bool unified = true;
};
std::optional<ControlGroup> control_group(const std::string& root) {
  std::ifstream groups(root + "/proc/self/cgroup");
  std::optional<ControlGroup> found;
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const auto inside = std::filesystem::path(line.substr(second + 1)).relative_path();
    if (("," + controllers + ",").find(",memory,") != std::string::npos) return ControlGroup{root + "/sys/fs/cgroup/memory", inside, false};
    if (controllers.empty()) found = ControlGroup{root + "/sys/fs/cgroup", inside, true};
  }
  return found;
}

}  // namespace

HostMemory host_memory(const std::string& root) {
  const auto machine = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::filesystem::path meminfo = root + "/proc/meminfo";
  HostMemory memory;
  memory.limit = root.empty() ? machine : field_of(meminfo, {"MemTotal:"}).value_or(0) * 1024;
  const auto free = field_of(meminfo, {"MemAvailable:"});
  memory.available = free ? *free * 1024 : memory.limit;
  const auto group = control_group(root);
  if (!group) return memory;
  for (std::filesystem::path inside = group->inside;; inside = inside.parent_path()) {
    const auto folder = group->mount / inside;
    const auto limit = number_in(folder / (group->unified ? "memory.max" : "memory.limit_in_bytes")).value_or(kNoLimit);
    if (limit < memory.limit) {
      memory.limit = limit;
      const auto used = number_in(folder / (group->unified ? "memory.current" : "memory.usage_in_bytes")).value_or(0);
      const auto cached = field_of(folder / "memory.stat", {"inactive_file", "active_file"}).value_or(0);
      const std::size_t taken = used - std::min(used, cached);  // the cache gives way
      memory.available = std::min(memory.available, limit - std::min(limit, taken));
    }
    if (inside.empty()) break;
  }
  return memory;
}

}  // namespace muster::transport
