// SPDX-License-Identifier: BSD-3-Clause
/// How long a test waits for what must happen.
///
/// The limit only ends a test that hangs: a busy machine must never reach it, so it is generous,
/// and more so in a sanitized build. A test of what happens after a time uses a clock that it moves
/// by hand, or compares the order of events. ctest ends a test after 300 s.
#pragma once

#include <chrono>

#include "testing/budget.h"

namespace muster::testing {

inline constexpr std::chrono::seconds kMustHappen{kSanitized ? 290 : 250};
/// The same for ::poll.
inline constexpr int kMustHappenMs = std::chrono::milliseconds(kMustHappen).count();

}  // namespace muster::testing
