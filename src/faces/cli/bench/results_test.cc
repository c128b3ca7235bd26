// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/bench/results.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace muster::cli::bench {
namespace {

Row row(const std::string& library, std::uint64_t bytes, double loop_us, double p50_us) {
  return summarize(library, Cell{.op = "all_reduce", .bytes = bytes}, 2, "shm",
                   {Figures{loop_us, p50_us, p50_us, p50_us, 100}});
}

TEST(BenchLines, OrdersAndAnswersComeBackAsTheyWere) {
  const Cell cell{"all_to_all", 1 << 20, "int64", "arena", 0.25, 0.5, CountFrom::first_start};
  const auto back = decode_order(encode(cell));
  ASSERT_TRUE(back.ok() && back->has_value());
  EXPECT_EQ((*back)->op, "all_to_all");
  EXPECT_EQ((*back)->bytes, std::uint64_t{1} << 20);
  EXPECT_EQ((*back)->dtype, "int64");
  EXPECT_EQ((*back)->memory, "arena");
  EXPECT_EQ((*back)->seconds, 0.25);
  EXPECT_EQ((*back)->settling, 0.5);
  EXPECT_EQ((*back)->from, CountFrom::first_start);
  EXPECT_FALSE(decode_order("quit")->has_value());
  EXPECT_FALSE(decode_order("cell all_reduce many").ok());
  EXPECT_FALSE(decode_order("cell all_reduce 8 float32 private 0.1 0 few").ok());

  const CellResult answer = decode_answer("row 1.5 2.5 1.25 9 1000");
  ASSERT_TRUE(answer.figures.has_value());
  EXPECT_EQ(answer.figures->loop_us, 1.5);
  EXPECT_EQ(answer.figures->p50_us, 2.5);
  EXPECT_EQ(answer.figures->iterations, 1000u);
  EXPECT_TRUE(decode_answer("skip no such thing").skipped);
  EXPECT_EQ(decode_answer("skip no such thing").reason, "no such thing");
  EXPECT_EQ(decode_answer("error rank 1: it broke").reason, "rank 1: it broke");
  EXPECT_FALSE(decode_answer("hello").skipped);
}

TEST(BenchResults, SmallCallsAreComparedBackToBackAndLargeOnesAlone) {
  std::vector<Row> small = {row("muster", 8, 1, 4), row("openmpi", 8, 2, 2),
                            row("gloo", 8, 100, 100)};
  compare(small);
  EXPECT_DOUBLE_EQ(small[0].ratio, 0.5);
  EXPECT_DOUBLE_EQ(small[1].ratio, 2);
  EXPECT_DOUBLE_EQ(small[2].ratio, 100);
  std::vector<Row> large = {row("muster", 65536, 1, 4), row("openmpi", 65536, 2, 2)};
  compare(large);
  EXPECT_DOUBLE_EQ(large[0].ratio, 2);
  std::vector<Row> alone = {row("muster", 8, 1, 4)};
  compare(alone);
  EXPECT_EQ(alone[0].ratio, 0);
  EXPECT_NE(json(alone[0]).find("\"ratio_to_best\":null"), std::string::npos);
}

TEST(BenchResults, EachMemoryStandsBesideTheSameLibraries) {
  Row arena = row("muster", 65536, 1, 1), plain = row("muster", 65536, 2, 4);
  arena.cell.memory = "arena";
  arena.engine = true;
  std::vector<Row> rows = {plain, arena, row("openmpi", 65536, 2, 2)};
  compare(rows);
  EXPECT_DOUBLE_EQ(rows[0].ratio, 2) << "of the other library, not of the other memory's";
  EXPECT_DOUBLE_EQ(rows[1].ratio, 0.5);
  EXPECT_DOUBLE_EQ(rows[2].ratio, 2);
  const std::string lines = table_lines(rows);
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 2) << lines;
  EXPECT_LT(lines.find("private"), lines.find("arena"));
  EXPECT_EQ(json(rows[0]).find("engine"), std::string::npos);
  EXPECT_NE(json(rows[1]).find("\"engine\":true,"), std::string::npos);
}

TEST(BenchResults, RoundsBecomeMediansAndASpread) {
  const Row summary =
      summarize("muster", Cell{.op = "barrier", .bytes = 0}, 4, "shm",
                {Figures{3, 1, 0.5, 9, 10}, Figures{1, 2, 0.4, 8, 10}, Figures{2, 3, 0.6, 7, 10}});
  EXPECT_EQ(summary.figures.loop_us, 2);
  EXPECT_EQ(summary.figures.p50_us, 2);
  EXPECT_EQ(summary.figures.min_us, 0.4);
  EXPECT_EQ(summary.figures.iterations, 30u);
  EXPECT_DOUBLE_EQ(summary.spread, 1);
}

}  // namespace
}  // namespace muster::cli::bench
