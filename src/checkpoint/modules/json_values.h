// SPDX-License-Identifier: BSD-3-Clause
/// Values as a checkpoint's JSON has them, for both languages.
#pragma once

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>

#include "checkpoint/format/files/json_text.h"

namespace muster::checkpoint {

/// Marks what JSON has no value for; Python's `muster.checkpoint` writes the same.
constexpr const char* kKind = "__muster__";

/// Infinities and NaN as text that says so.
inline nlohmann::json encoded(double value) {
  if (std::isfinite(value)) return value;
  return {{kKind, "float"}, {"of", std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf"}};
}
template <class T>
nlohmann::json encoded(const T& value) {
  return value;
}

/// Throws json::exception for a value of another type, and for a whole number that does not fit.
template <class T>
T decoded(const nlohmann::json& value) {
  if constexpr (std::is_same_v<T, double>)
    if (value.is_object() && value.value(kKind, "") == "float") {
      const std::string of = value.at("of");
      if (of == "nan") return std::numeric_limits<double>::quiet_NaN();
      if (of == "inf") return std::numeric_limits<double>::infinity();
      if (of == "-inf") return -std::numeric_limits<double>::infinity();
    }
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>)
    return shards::whole_number<T>(value);
  else
    return value.get<T>();
}

}  // namespace muster::checkpoint
