#include "core/shm/host_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

#include "core/base/process/control_group.h"

namespace muster::shm {
namespace {

constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

std::optional<std::size_t> number_in(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::size_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // missing, or "max"
}

/// In a file of lines "name number": the sum of the numbers of `names`.
std::optional<std::size_t> field_of(const std::filesystem::path& path,
                                    std::initializer_list<const char*> names) {
  std::ifstream file(path);
  std::optional<std::size_t> sum;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    std::size_t value = 0;
    if (words >> name >> value && std::find(names.begin(), names.end(), name) != names.end())
      sum = sum.value_or(0) + value;
  }
  return sum;
}

}  // namespace

HostMemory host_memory(const std::string& root) {
  const auto machine = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) *
                       static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::filesystem::path meminfo = root + "/proc/meminfo";
  HostMemory memory;
  memory.limit = root.empty() ? machine : field_of(meminfo, {"MemTotal:"}).value_or(0) * 1024;
  const auto free = field_of(meminfo, {"MemAvailable:"});
  memory.available = free ? *free * 1024 : memory.limit;
  for (const ControlGroup& group : control_groups("memory", root)) {
    const std::filesystem::path folder = group.folder;
    const auto limit = number_in(folder / (group.unified ? "memory.max" : "memory.limit_in_bytes"))
                           .value_or(kNoLimit);
    if (limit >= memory.limit) continue;
    memory.limit = limit;
    const auto used =
        number_in(folder / (group.unified ? "memory.current" : "memory.usage_in_bytes"))
            .value_or(0);
    const auto cached =
        field_of(folder / "memory.stat", {"inactive_file", "active_file"}).value_or(0);
    const std::size_t taken = used - std::min(used, cached);  // page cache can be evicted
    memory.available = std::min(memory.available, limit - std::min(limit, taken));
  }
  return memory;
}

}  // namespace muster::shm
