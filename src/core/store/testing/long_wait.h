/// Time limits of this folder's tests.
#pragma once

#include "muster/clock.h"

namespace muster::store {

/// Reached only if there is a defect.
inline constexpr Duration kLong = std::chrono::seconds(60);

}  // namespace muster::store
