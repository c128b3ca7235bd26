// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/doctor/interfaces.h"

#include <algorithm>
#include <utility>

namespace muster::cli {
namespace {

constexpr std::size_t kShown = 6, kNamed = 8;

/// "3 more: a, b, c"; nothing of none.
void add_sum(std::vector<std::string>& lines, const std::vector<std::string>& names,
             const std::string& what) {
  if (names.empty()) return;
  std::string text = std::to_string(names.size()) + " " + what + ": ";
  for (std::size_t i = 0; i < std::min(names.size(), kNamed); ++i)
    text += (i > 0 ? ", " : "") + names[i];
  lines.push_back(text + (names.size() > kNamed ? ", ..." : ""));
}

}  // namespace

std::vector<std::string> describe_interfaces(const std::vector<InterfaceAddress>& all) {
  std::vector<std::pair<std::string, std::string>> addressed;  // names and addresses
  std::vector<std::string> lines, others, local;
  for (const InterfaceAddress& each : all) {
    if (each.link_local) continue;
    const auto known =
        std::ranges::find(addressed, each.interface, [](const auto& one) { return one.first; });
    if (known == addressed.end())
      addressed.emplace_back(each.interface, each.address);
    else
      known->second += ", " + each.address;
  }
  for (const auto& [name, addresses] : addressed) {
    if (lines.size() < kShown)
      lines.push_back(name + " " + addresses);
    else
      others.push_back(name);
  }
  for (const InterfaceAddress& each : all) {
    const auto is_this = [&](const auto& one) { return one.first == each.interface; };
    if (std::ranges::none_of(addressed, is_this) && std::ranges::count(local, each.interface) == 0)
      local.push_back(each.interface);
  }
  add_sum(lines, others, "more");
  add_sum(lines, local, "with link-local addresses alone");
  return lines;
}

}  // namespace muster::cli
