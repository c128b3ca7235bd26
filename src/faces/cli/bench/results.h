// SPDX-License-Identifier: BSD-3-Clause
/// The output of a benchmark: a table for people, rows for programs, and a line of progress.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "faces/cli/bench/measurement.h"

namespace muster::cli::bench {

/// Rewrites one line of the terminal; silent elsewhere.
class ProgressLine {
 public:
  explicit ProgressLine(std::size_t all) : all_(all), shown_(::isatty(STDERR_FILENO) == 1) {}
  void next(const std::string& what) {
    ++done_;
    if (shown_) std::fprintf(stderr, "\r\033[K[%zu/%zu] %s", done_, all_, what.c_str());
  }
  void clear() const {
    if (shown_) std::fprintf(stderr, "\r\033[K");
  }

 private:
  std::size_t all_, done_ = 0;
  bool shown_;
};

/// One library in one cell, over the rounds of a run.
struct Row {
  std::string library;
  std::string transport;
  int ranks = 0;
  Cell cell;
  Figures figures;    ///< medians over the rounds
  double spread = 0;  ///< of the compared figure: greatest less least, in parts of the median
  double ratio =
      0;  ///< to the best other library's compared figure; 0: there is none. Below 1 is faster
  std::string no_figures;  ///< why there are none
  bool engine = false;     ///< muster's engine below the tensors, without recorder and validation
  bool threads = false;    ///< muster's ranks are threads of one process
};

/// The figure by which libraries are compared: `p50_us` from 64 KiB up, where bandwidth counts,
/// `loop_us` below.
double compared(const Row& row);

/// Medians and the spread over rounds.
Row summarize(std::string library, const Cell& cell, int ranks, std::string transport,
              const std::vector<Figures>& rounds);
/// Sets `ratio` in the rows of one cell, where one library may have several rows, with a memory
/// each.
void compare(std::vector<Row>& rows);

std::string table_head(const std::vector<std::string>& libraries);
/// The rows of one cell: a line for each row of the first one's library, with the other libraries'
/// beside it.
std::string table_lines(const std::vector<Row>& rows);
/// One JSON object.
std::string json(const Row& row);

/// "8 B", "64 KiB".
std::string size_text(std::uint64_t bytes);

}  // namespace muster::cli::bench
