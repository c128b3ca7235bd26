// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/process/limits.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

#include "core/base/descriptor.h"

namespace muster {
namespace {

bool names(std::string_view list, std::string_view controller) {
  for (std::size_t at = 0; at <= list.size();) {
    const std::size_t end = std::min(list.find(',', at), list.size());
    if (list.substr(at, end - at) == controller) return true;
    at = end + 1;
  }
  return false;
}

}  // namespace

std::optional<std::string> small_file(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return std::nullopt;
  std::string text;
  std::array<char, 4096> part;
  for (;;) {
    const ssize_t got = ::read(file.get(), part.data(), part.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return std::nullopt;
    text.append(part.data(), static_cast<std::size_t>(got));
    if (static_cast<std::size_t>(got) < part.size())
      return text;  // files of /proc and /sys fill what they can
  }
}

std::vector<ControlGroup> control_groups(std::string_view controller, const std::string& root) {
  std::vector<ControlGroup> groups;
  const std::string text = small_file(root + "/proc/self/cgroup").value_or("");
  for (std::string_view left(text); !left.empty();) {
    const std::string_view line = left.substr(0, left.find('\n'));
    left.remove_prefix(std::min(left.size(), line.size() + 1));
    const std::size_t first = line.find(':'),
                      second = first == line.npos ? first : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string_view controllers = line.substr(first + 1, second - first - 1);
    const bool unified = controllers.empty();
    if (!unified && !names(controllers, controller)) continue;
    const std::string mount =
        root + "/sys/fs/cgroup" + (unified ? "" : "/" + std::string(controller));
    std::string inside(line.substr(second + 1));
    while (!inside.empty() && inside.back() == '/') inside.pop_back();
    for (;;) {
      groups.push_back({mount + inside, unified});
      if (inside.empty()) break;
      inside.erase(inside.rfind('/') == inside.npos ? 0 : inside.rfind('/'));
    }
  }
  return groups;
}

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

}  // namespace muster
