/// How long tests of this folder wait for what is to happen at once.
#pragma once

#include "muster/base/clock.h"

namespace muster::store {

/// A limit for defects.
inline constexpr Duration kLong = std::chrono::seconds(60);

}  // namespace muster::store
