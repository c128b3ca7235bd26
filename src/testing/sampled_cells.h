// SPDX-License-Identifier: BSD-3-Clause
/// A suite over many parameters of which the sanitized builds, several times slower, play half in
/// an ordinary run.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>

#include "testing/budget.h"
#include "testing/seed.h"

namespace muster::testing {

/// Whether the test of this name, its parameter included, is played with this run's seed.
inline bool is_drawn(const std::string& name) {
  if (!kSanitized || long_tests()) return true;
  std::mt19937_64 random(test_seed() * 1'000'003 + std::hash<std::string>()(name));
  return random() % 2 == 0;
}

/// Fixtures with a SetUp() of their own call this one's first.
template <class Parameter>
class SampledCells : public ::testing::TestWithParam<Parameter> {
 protected:
  void SetUp() override {
    if (!is_drawn(::testing::UnitTest::GetInstance()->current_test_info()->name()))
      GTEST_SKIP() << "not drawn with MUSTER_TEST_SEED=" << test_seed()
                   << "; MUSTER_TEST_LONG=1 plays all";
  }
};

}  // namespace muster::testing
