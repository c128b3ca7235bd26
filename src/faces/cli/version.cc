// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/version.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <vector>

namespace muster::cli {
namespace {

/// The minors of torch for which there are extensions beside the program, as the wheel has them in
/// torch_<major>_<minor>, from the oldest on.
std::string torches_of_wheel() {
  namespace fs = std::filesystem;
  std::error_code failed;
  const fs::path program = fs::read_symlink("/proc/self/exe", failed);
  std::vector<std::pair<int, int>> minors;
  for (const auto& entry : fs::directory_iterator(program.parent_path().parent_path(), failed)) {
    int major = 0, minor = 0;
    if (std::sscanf(entry.path().filename().c_str(), "torch_%d_%d", &major, &minor) == 2)
      minors.emplace_back(major, minor);
  }
  std::sort(minors.begin(), minors.end());
  std::string text;
  for (const auto& [major, minor] : minors)
    text += (text.empty() ? "" : ", ") + std::to_string(major) + "." + std::to_string(minor);
  return text;
}

}  // namespace

std::string torch_version() {
  const std::string wheel = torches_of_wheel(), built = MUSTER_TORCH_VERSION;
  if (!wheel.empty()) return wheel;
  return built.empty() ? "none" : built;
}

std::string compiler_version() { return MUSTER_COMPILER; }

std::string version_text() {
  const std::string at = commit();
  return std::string("muster ") + MUSTER_VERSION + (at.empty() ? "" : " (" + at + ")") +
         "\ntorch " + torch_version() + "\ncompiler " + compiler_version() + "\n";
}

}  // namespace muster::cli
