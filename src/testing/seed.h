// SPDX-License-Identifier: BSD-3-Clause
/// The seed of a test run: `MUSTER_TEST_SEED` where set, so that a failing run replays;
/// `MUSTER_TEST_LONG=1` asks for whole matrices.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace muster::testing {

inline std::uint64_t test_seed() {
  const char* text = std::getenv("MUSTER_TEST_SEED");
  return text != nullptr && *text != '\0' ? std::strtoull(text, nullptr, 10) : 20240607;
}

inline bool long_tests() {
  const char* text = std::getenv("MUSTER_TEST_LONG");
  return text != nullptr && *text == '1';
}

}  // namespace muster::testing
