#include "core/base/process/control_group.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

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

}  // namespace muster
