// SPDX-License-Identifier: BSD-3-Clause
/// What `--json` prints: one object a line.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace muster::cli {

inline constexpr const char* kJsonHelp = "print one JSON object a line instead";

/// The object and a newline, in ASCII without control characters: names may be anybody's. Bytes
/// that are no UTF-8 become U+FFFD.
inline std::string json_line(const nlohmann::json& object) {
  return object.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace muster::cli
