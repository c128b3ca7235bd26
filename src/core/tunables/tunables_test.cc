// SPDX-License-Identifier: BSD-3-Clause
#include "core/tunables/tunables.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>

#include "core/tunables/tuning_file.h"

namespace muster {
namespace {

using std::chrono::microseconds;

TEST(Tunables, AreTheDefaultsWithoutAnOverride) {
  Tunables values = default_tunables();
  for (const Tunable& row : tunable_rows()) {
    for (const bool shared : {false, true}) EXPECT_GE(value_of(row, values, shared), 1) << row.name;
    EXPECT_FALSE(row.reason.empty()) << row.name;
    EXPECT_TRUE(row.reason.ends_with('.')) << row.name;
    EXPECT_TRUE(row.bench.starts_with("muster bench") || row.bench.starts_with("muster-lab") ||
                row.bench == "tools/gpu_check")
        << row.name;
  }
  EXPECT_EQ(values.link_spin, microseconds(40));
  EXPECT_EQ(values.callback_look, std::chrono::milliseconds(10));
  EXPECT_EQ(values.callback_idle, std::chrono::milliseconds(500));
  EXPECT_EQ(values.one_shot(false), 64u * 1024);
  EXPECT_EQ(values.one_shot(true), 128u * 1024);
  EXPECT_EQ(values.direct_read_pair == SIZE_MAX / 2, cpu_family() == CpuFamily::amd);
}

TEST(Tunables, AnOverrideChangesItsRowAlone) {
  Tunables values = default_tunables();
  ASSERT_TRUE(override_tunable(values, "link_spin", "20us"));
  EXPECT_EQ(values.link_spin, microseconds(20));
  ASSERT_TRUE(override_tunable(values, "small_call", "64 KiB"));
  EXPECT_EQ(values.small_call, 64u * 1024);
  ASSERT_TRUE(override_tunable(values, "few_ranks", "16"));
  EXPECT_EQ(values.few_ranks, 16);
  ASSERT_TRUE(override_tunable(values, "direct_read", "never"));
  EXPECT_GT(values.direct_read, std::size_t{1} << 60);
  ASSERT_TRUE(override_tunable(values, "one_shot.oversubscribed", "1 MiB"));
  EXPECT_EQ(values.one_shot(false), 64u * 1024);
  EXPECT_EQ(values.one_shot(true), 1024u * 1024);
  ASSERT_TRUE(override_tunable(values, "one_shot", "4096"));
  EXPECT_EQ(values.one_shot(false), 4096u);
  EXPECT_EQ(values.one_shot(true), 4096u);
  EXPECT_EQ(values.link_yield, default_tunables().link_yield);
}

TEST(Tunables, AWrongOverrideSaysWhatToWrite) {
  Tunables values = default_tunables();
  const auto refusal = [&](std::string_view name, std::string_view text) {
    const Status status = override_tunable(values, name, text);
    EXPECT_EQ(status.code(), Code::invalid_argument) << name;
    return status.message();
  };
  EXPECT_EQ(refusal("link_spun", "1 us"),
            "\"link_spun\" is no tunable; there are link_spin, link_yield");
  EXPECT_EQ(refusal("nothing", "1"), "\"nothing\" is no tunable");
  EXPECT_EQ(refusal("link_spin", "40"),
            "\"40\" is no value of link_spin; write a time, as in 40 us or 1 ms, at least 1");
  EXPECT_EQ(refusal("small_call", "lots"),
            "\"lots\" is no value of small_call; write a size, as in 65536, 64 KiB or never, at "
            "least 1");
  EXPECT_EQ(refusal("few_ranks", "0"),
            "\"0\" is no value of few_ranks; write a whole number, as in 8, at least 1");
  EXPECT_EQ(refusal("link_spin", "3601 s"),
            "\"3601 s\" is too long for link_spin; write at most 3600 s");
  refusal("link_spin", "9223372036854775807 ns");
  EXPECT_EQ(refusal("eager", "1 MiB"),
            "\"eager\" is part of what members send or share and cannot be changed");
  EXPECT_EQ(refusal("link_spin.dedicated", "1 us"),
            "\"link_spin.dedicated\" is no tunable; write link_spin");
  EXPECT_EQ(refusal("one_shot.shared", "1"),
            "\"one_shot.shared\" is no tunable; write one_shot, or .dedicated or .oversubscribed "
            "behind it");
  for (const char* text : {"", "-1", "1 h", "99999999999999999999 s", "1.5 ms"})
    refusal("link_spin", text);
  for (const char* text : {"", "-1", "1 GB", "99999999999999999999", "99999999999999999 MiB"})
    refusal("small_call", text);
  EXPECT_EQ(values.link_spin, default_tunables().link_spin);
  EXPECT_TRUE(override_tunable(values, "link_spin", "3600 s")) << "the longest";
}

TEST(Tunables, TextsAreReadAsTheyArePrinted) {
  for (const Tunable& row : tunable_rows()) {
    if (row.scope == Tunable::TunableScope::fixed) continue;
    Tunables values{};
    const std::int64_t value = value_of(row, default_tunables(), true);
    ASSERT_TRUE(override_tunable(values, row.name, text_of(row, value))) << row.name;
    EXPECT_EQ(value_of(row, values, true), value) << row.name;
  }
}

// As `muster tunables --markdown > docs/user/tunables.md` writes it.
TEST(Tunables, ThePageOfTheDocumentationIsTheTable) {
  std::ifstream file(MUSTER_SOURCE_FOLDER "/docs/user/tunables.md");
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_EQ(text.str(), tunables_page()) << "write it by muster tunables --markdown";
}

TEST(TuningFile, LinesHaveNumberKeyAndValue) {
  const auto lines = tuning_lines("# by hand\nversion = 1\n\nlink_spin = 20 us  # less\n", "x");
  ASSERT_TRUE(lines) << lines.status().message();
  ASSERT_EQ(lines->size(), 1u);
  EXPECT_EQ(lines->front().number, 4);
  EXPECT_EQ(lines->front().key, "link_spin");
  EXPECT_EQ(lines->front().value, "20 us");
}

}  // namespace
}  // namespace muster
