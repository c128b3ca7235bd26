// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "core/base/environment.h"

namespace muster {
namespace {

// As `muster environment --markdown > docs/user/environment.md` writes it.
TEST(EnvironmentTable, ThePageOfTheDocumentationIsTheTable) {
  std::ifstream file(MUSTER_SOURCE_FOLDER "/docs/user/environment.md");
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_EQ(text.str(), environment_page()) << "write it by muster environment --markdown";
}

TEST(EnvironmentTable, ThePageFitsIntoAHundredColumns) {
  std::istringstream page(environment_page());
  for (std::string line; std::getline(page, line);) EXPECT_LE(line.size(), 100u) << line;
}

}  // namespace
}  // namespace muster
