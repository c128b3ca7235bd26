/// Time limits of this folder's tests.
#pragma once

#include "muster/clock.h"
#include "testing/limits.h"

namespace muster::store {

/// Reached only if there is a defect.
inline constexpr Duration kLong = testing::kMustHappen;

}  // namespace muster::store
