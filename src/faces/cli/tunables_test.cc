// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <fstream>

#include "core/tunables/tunables.h"
#include "faces/cli/testing/launched.h"

namespace muster::cli::testing {
namespace {

TEST(TunablesCommand, PrintsTheTableAndWhatOverridesIt) {
  const Outcome page = run({"tunables", "--markdown"});
  EXPECT_EQ(page.code, 0) << page.err;
  EXPECT_EQ(page.out, tunables_page());

  Fifo scratch;  // for its folder
  const std::string file = scratch.folder() + "/tuning";
  std::ofstream(file) << "version = 1\nlink_spin = 20 us\nsmall_call = 8 KiB\n"
                         "network.reduce.2 = slices\n";
  const Outcome list =
      run({"tunables"}, {{"MUSTER_TUNING", file}, {"MUSTER_TUNE", "link_spin=30us, few_ranks=16"}});
  EXPECT_EQ(list.code, 0) << list.err;
  for (const char* line : {"30 us", "overridden; by default 40 us", "8 KiB", "few_ranks"})
    EXPECT_TRUE(contains(list.out, line)) << line << "\n" << list.out;
  EXPECT_FALSE(contains(list.out, "20 us  ")) << "MUSTER_TUNE comes after the file";
}

TEST(TunablesCommand, SaysWhatIsWrongWithAnOverride) {
  const Outcome name = run({"tunables"}, {{"MUSTER_TUNE", "link_spun=1us"}});
  EXPECT_EQ(name.code, 2);
  EXPECT_TRUE(contains(name.err,
                       "MUSTER_TUNE holds \"link_spun=1us\": \"link_spun\" is no tunable; there "
                       "are link_spin, link_yield; muster tunables lists the names"))
      << name.err;
  const Outcome bare = run({"tunables"}, {{"MUSTER_TUNE", "link_spin"}});
  EXPECT_TRUE(contains(bare.err, "\"link_spin\" is not NAME=VALUE")) << bare.err;

  Fifo scratch;  // for its folder
  const std::string file = scratch.folder() + "/tuning";
  std::ofstream(file) << "version = 1\n\nlink_spin = soon\n";
  const Outcome line = run({"tunables"}, {{"MUSTER_TUNING", file}});
  EXPECT_EQ(line.code, 2);
  EXPECT_TRUE(contains(line.err, "tuning file " + file + ", line 3: \"soon\" is no value"))
      << line.err;
}

}  // namespace
}  // namespace muster::cli::testing
