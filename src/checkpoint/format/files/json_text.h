/// Reads JSON that comes from a file: whatever it says, in time and stack that its length bounds.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "muster/status.h"

namespace muster::shards {

/// The parsed text. Refuses what is no JSON object, a name that its outermost object has twice (a
/// parser would keep the last) and values nested more than 500 deep, which would exhaust the stack.
Result<nlohmann::json> parse_object(std::string_view text);

}  // namespace muster::shards
