// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include "core/base/environment.h"
#include "faces/cli/testing/launched.h"

namespace muster::cli::testing {
namespace {

TEST(EnvironmentCommand, PrintsWhatIsSetButNoSecret) {
  const Outcome list = run({"environment"}, {{"MUSTER_TUNING", "off"},
                                             {"MUSTER_SECRET", "sixteen letters!"},
                                             {"RANK", "3"},
                                             {"MUSTER_ALGORITHM", ""}});
  EXPECT_EQ(list.code, 0) << list.err;
  for (const char* line : {"MUSTER_TUNING=off\n", "RANK=3\n", "MUSTER_SECRET=(not shown)\n"})
    EXPECT_TRUE(contains(list.out, line)) << line << "\n" << list.out;
  EXPECT_FALSE(contains(list.out, "sixteen"));
  EXPECT_FALSE(contains(list.out, "MUSTER_ALGORITHM")) << "empty is unset";
  EXPECT_EQ(list.out.find("RANK=3"), list.out.rfind("RANK=3")) << "once";
}

TEST(EnvironmentCommand, PrintsTheTable) {
  const Outcome page = run({"environment", "--markdown"});
  EXPECT_EQ(page.code, 0) << page.err;
  EXPECT_EQ(page.out, environment_page());
  const Outcome all = run({"environment", "--all"});
  EXPECT_TRUE(contains(all.out, "  MUSTER_TRACE_ENTRIES (default: 2000)\n")) << all.out;
  EXPECT_EQ(run({"environment", "--nonsense"}).code, 2);
}

}  // namespace
}  // namespace muster::cli::testing
