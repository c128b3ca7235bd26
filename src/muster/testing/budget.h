/// How long a sampled matrix may take: `MUSTER_TEST_BUDGET_S` seconds where set (sanitizers: less), else what the test asks for; no limit
/// in long runs.
#pragma once

#include <chrono>
#include <cstdlib>

#include "muster/testing/seed.h"

namespace muster::testing {

inline std::chrono::duration<double> test_budget(double seconds) {
  if (long_tests()) return std::chrono::duration<double>(1e9);
  const char* text = std::getenv("MUSTER_TEST_BUDGET_S");
  return std::chrono::duration<double>(text != nullptr && *text != '\0' ? std::strtod(text, nullptr) : seconds);
}

}  // namespace muster::testing
