// SPDX-License-Identifier: BSD-3-Clause
/// Time limits of this folder's tests.
#pragma once

#include "muster/clock.h"
#include "testing/limits.h"

namespace muster::store {

/// Reached only if there is a defect.
inline constexpr Duration kLong = testing::kMustHappen;

/// How long a call waits for what never comes, where its own way to the store is part of that time:
/// who comes must be there by then, also on a busy machine.
inline constexpr Duration kInVain = std::chrono::seconds(testing::kSanitized ? 10 : 3);

}  // namespace muster::store
