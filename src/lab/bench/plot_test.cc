// SPDX-License-Identifier: BSD-3-Clause
#include "lab/bench/plot.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace muster::lab {
namespace {

using cli::bench::Cell;
using cli::bench::Figures;
using cli::bench::Row;
using cli::bench::summarize;

Row row(const std::string& library, std::uint64_t bytes, double loop_us, double p50_us) {
  return summarize(library, Cell{.op = "all_reduce", .bytes = bytes}, 2, "shm",
                   {Figures{loop_us, p50_us, p50_us, p50_us, 100}});
}

TEST(Plot, ThePictureHasAPanelForEachOperationAndALineForEachLibrary) {
  std::vector<Row> rows;
  for (const std::uint64_t bytes : {8, 1 << 20}) {
    rows.push_back(row("muster", bytes, 1, 1));
    rows.push_back(row("gloo", bytes, 10, 10));
  }
  rows.push_back(row("muster", 8, 1, 1));
  rows.back().cell.op = "broadcast";
  rows.push_back(summarize("mpich", rows[0].cell, 2, "shm", {}));  // was skipped
  rows.push_back(row("muster", 8, 1, 1));
  rows.back().cell.memory = "arena";
  const std::string svg = plot(rows);
  EXPECT_NE(svg.find("all_reduce, 2 ranks"), std::string::npos);
  EXPECT_NE(svg.find("broadcast, 2 ranks"), std::string::npos);
  std::size_t lines = 0;
  for (std::size_t at = 0; (at = svg.find("<polyline", at)) != std::string::npos; ++at) ++lines;
  EXPECT_EQ(lines, 4u);
  EXPECT_NE(svg.find("muster, arena"), std::string::npos);
  EXPECT_EQ(svg.find("mpich"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
}

/// The right end of a picture's texts, at the average width of a letter of a wide font.
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
TEST(Plot, TheLegendStaysWithinThePicture) {
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
}  // namespace muster::lab
