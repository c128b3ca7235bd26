/// The control groups that limit this process.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace muster {

struct ControlGroup {
  std::string folder;
  bool unified = true;  ///< version 2; else the controller's own tree of version 1
};

/// Those of `controller` ("cpu", "memory"), from our own up to the root of what is mounted here.
/// `root`: where /proc and /sys stand, for tests.
std::vector<ControlGroup> control_groups(std::string_view controller, const std::string& root = "");

/// The whole of a small file of the system; nothing where it cannot be read.
std::optional<std::string> small_file(const std::string& path);

}  // namespace muster
