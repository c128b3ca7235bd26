/// Formats ranks for messages.
#pragma once

#include <string>
#include <vector>

namespace muster::group {

/// "[0, 2, 5]".
inline std::string list(const std::vector<int>& ranks) {
  std::string out = "[";
  for (const auto rank : ranks) out += (out.size() > 1 ? ", " : "") + std::to_string(rank);
  return out + "]";
}

}  // namespace muster::group
