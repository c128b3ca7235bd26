// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/loopback_host.h"

#include <algorithm>
#include <cctype>
#include <string>

namespace muster::cli {

bool is_loopback_host(std::string_view host) {
  std::string name(host);
  const std::size_t bracket = name.rfind(']'), colon = name.rfind(':');
  if (colon != std::string::npos && (bracket == std::string::npos || colon > bracket)) {
    const std::string port = name.substr(colon + 1);
    const bool digits =
        std::all_of(port.begin(), port.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
    if (!digits) return false;
    name.resize(colon);
  }
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return name == "127.0.0.1" || name == "localhost" || name == "[::1]";
}

}  // namespace muster::cli
