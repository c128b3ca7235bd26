// SPDX-License-Identifier: BSD-3-Clause
/// Reads JSON that comes from a file: whatever it says, in time and stack that its length bounds.
#pragma once

#include <concepts>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "checkpoint/format/plan/box.h"
#include "muster/status.h"

namespace muster::shards {
/// The parsed text. Refuses what is no JSON object, a name that its outermost object has twice (a
/// parser would keep the last) and values nested more than 500 deep, which would exhaust the stack.
Result<nlohmann::json> parse_object(std::string_view text);

// Whole numbers from JSON that someone else wrote.

/// The number as a T. Throws json::exception for one with a fraction or an exponent, for one out of
/// T's range and for what is no number; the library's own conversion cuts numbers off.
template <std::integral T>
T whole_number(const nlohmann::json& value) {
  const bool fits = value.is_number_unsigned()  ? std::in_range<T>(value.get<std::uint64_t>())
                    : value.is_number_integer() ? std::in_range<T>(value.get<std::int64_t>())
                                                : false;
  if (!fits)
    throw nlohmann::json::type_error::create(302, value.dump() + " is no whole number that fits",
                                             &value);
  return value.get<T>();
}

/// A list of whole numbers. Throws json::exception where it is none.
inline Extent extent_of(const nlohmann::json& list) {
  if (!list.is_array())
    throw nlohmann::json::type_error::create(302, list.dump() + " is no list", &list);
  Extent extent;
  for (const nlohmann::json& each : list) extent.push_back(whole_number<std::int64_t>(each));
  return extent;
}

}  // namespace muster::shards
