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

TEST(BenchResults, EachMemoryStandsBesideTheSameRivals) {
  Row arena = row("muster", 65536, 1, 1), plain = row("muster", 65536, 2, 4);
  arena.cell.memory = "arena";
  arena.engine = true;
  std::vector<Row> rows = {plain, arena, row("openmpi", 65536, 2, 2)};
  compare(rows);
  EXPECT_DOUBLE_EQ(rows[0].ratio, 2) << "of the rival's, not of the other memory's";
  EXPECT_DOUBLE_EQ(rows[1].ratio, 0.5);
  EXPECT_DOUBLE_EQ(rows[2].ratio, 2);
  const std::string lines = table_lines(rows);
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 2) << lines;
  EXPECT_LT(lines.find("private"), lines.find("arena"));
  EXPECT_EQ(json(rows[0]).find("engine"), std::string::npos);
  EXPECT_NE(json(rows[1]).find("\"engine\":true,"), std::string::npos);
  const std::string svg = plot(rows);
  EXPECT_NE(svg.find("muster, arena"), std::string::npos);
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

TEST(BenchResults, ThePictureHasAPanelForEachOperationAndALineForEachLibrary) {
  std::vector<Row> rows;
  for (const std::uint64_t bytes : {8, 1 << 20}) {
    rows.push_back(row("muster", bytes, 1, 1));
    rows.push_back(row("gloo", bytes, 10, 10));
  }
  rows.push_back(row("muster", 8, 1, 1));
  rows.back().cell.op = "broadcast";
  rows.push_back(summarize("mpich", rows[0].cell, 2, "shm", {}));  // was skipped
  const std::string svg = plot(rows);
  EXPECT_NE(svg.find("all_reduce, 2 ranks"), std::string::npos);
  EXPECT_NE(svg.find("broadcast, 2 ranks"), std::string::npos);
  std::size_t lines = 0;
  for (std::size_t at = 0; (at = svg.find("<polyline", at)) != std::string::npos; ++at) ++lines;
  EXPECT_EQ(lines, 3u);
  EXPECT_EQ(svg.find("mpich"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
}

/// Where the texts of a picture end, at the average width of a letter of a wide font.
double right_edge_of_texts(const std::string& svg) {
  double edge = 0;
  for (std::size_t at = 0; (at = svg.find("<text x=\"", at)) != std::string::npos; ++at) {
    if (svg.compare(svg.find("text-anchor", at), 19, "text-anchor=\"start\"") != 0) continue;
    const std::size_t from = svg.find('>', at) + 1;
    edge = std::max(edge, std::stod(svg.substr(at + 9)) +
                              5.2 * static_cast<double>(svg.find('<', from) - from));
  }
  return edge;
}

// A picture of one panel has the legend of one with three, and no room for it in one line.
TEST(BenchResults, TheLegendStaysWithinThePicture) {
  std::vector<Row> rows;
  for (const char* op : {"all_reduce", "broadcast", "all_gather"}) {
    for (const char* library : {"muster", "gloo", "openmpi", "mpich", "impi"}) {
      rows.push_back(row(library, 8, 1, 1));
      rows.back().cell.op = op;
      if (rows.back().library != "muster") continue;
      for (const char* memory : {"arena", "allocator"}) {
        rows.push_back(rows.back());
        rows.back().cell.memory = memory;
      }
    }
    const std::string svg = plot(rows);
    const double width = std::stod(svg.substr(svg.find("width=\"") + 7));
    EXPECT_LE(right_edge_of_texts(svg), width) << svg;
    EXPECT_NE(svg.find("better<"), std::string::npos);
  }
}

}  // namespace
}  // namespace muster::cli::bench
