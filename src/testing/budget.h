// SPDX-License-Identifier: BSD-3-Clause
/// How much of a sampled matrix a test run takes, in time or in rounds.
///
///   an ordinary run       what the test asks for, times `MUSTER_TEST_SHARE` (the sanitized builds
///       set 0.25); where it is set, `MUSTER_TEST_BUDGET_S` seconds
///   MUSTER_TEST_LONG=1    all of it
///   ... and MUSTER_TEST_LONG_BUDGET_S=n, as the sanitized builds have it: a larger sample, n
///       seconds of each matrix
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdlib>

#include "testing/seed.h"

namespace muster::testing {

/// The number that the variable holds.
inline double budget_variable(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::strtod(text, nullptr) : otherwise;
}

inline constexpr double kNoLimit = 1e9;

/// Whether this is a build with AddressSanitizer or ThreadSanitizer.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)  // clang++ has no macro for them
inline constexpr bool kSanitized =
    __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
inline constexpr bool kSanitized = false;
#endif

/// The part of a test's own time or rounds that an ordinary run plays.
inline double sample_share() { return budget_variable("MUSTER_TEST_SHARE", 1); }

/// Cases that a release build plays whole, and a long run: the sanitized builds play every n-th of
/// them, from a drawn one on.
struct Stride {
  int first, step;
};
inline Stride stride_of_cases() {
  if (long_tests()) return {0, 1};
  const int step = static_cast<int>(1 / sample_share()) | 1;  // odd: bits of a case's number vary
  return {static_cast<int>(test_seed() % static_cast<std::uint64_t>(step)), step};
}

/// Whether matrices are played to their end.
inline bool whole_matrices() {
  return long_tests() && budget_variable("MUSTER_TEST_LONG_BUDGET_S", kNoLimit) >= kNoLimit;
}

/// Time for a matrix that an ordinary run samples for `seconds` and a long one for `long_seconds`.
inline std::chrono::duration<double> test_budget(double seconds, double long_seconds = kNoLimit) {
  if (!long_tests())
    return std::chrono::duration<double>(
        budget_variable("MUSTER_TEST_BUDGET_S", sample_share() * seconds));
  return std::chrono::duration<double>(
      std::min(long_seconds, budget_variable("MUSTER_TEST_LONG_BUDGET_S", kNoLimit)));
}

/// Rounds of a test whose rounds are alike.
inline int test_rounds(int ordinary, int whole) {
  if (!long_tests()) return std::max(1, static_cast<int>(sample_share() * ordinary));
  return whole_matrices() ? whole : std::min(whole, 4 * ordinary);
}

}  // namespace muster::testing
