// SPDX-License-Identifier: BSD-3-Clause
/// Orders and results of measurements, as lines of text between the program that asks and the ranks
/// that measure.
///
/// A library is measured by its ranks. Each rank reads its orders, a line each, from the
/// named pipe `to-<rank>` of a folder:
///
///   cell <op> <bytes> <dtype> <memory> <seconds> <settling> <from>
///   quit
///
/// and one of them answers every cell with one line in the pipe `back`. Ranks of several hosts
/// share no folder: without one they read their standard input and answer on their standard output.
///
///   row <loop_us> <p50_us> <min_us> <p99_us> <iterations>
///   skip <reason>            (the library has no such operation)
///   error <text>
///
/// <from> says from whose start a call counts: `last`, `first` or `own`. The workers of other
/// libraries (bench/mpi_worker.c, bench/gloo_worker.py) speak the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/bytes.h"
#include "muster/status.h"

namespace muster::cli::bench {

/// From whose start a call counts; it ends when the last rank has ended.
enum class CountFrom {
  last_start,   ///< the last rank's: what a barrier's skew adds is none of the call's
  first_start,  ///< the first rank's: what early ranks send meanwhile is part of the call
  own_start,    ///< each rank's own, on the slowest one: ranks of several machines share no clock
};

/// One operation at one size. `bytes` is what each rank gives to a reduction or an all_to_all, what
/// the root gives in all to a broadcast or a scatter, and what each rank receives in all from an
/// all_gather, or the root from a gather. A ping_pong is a message of so many bytes from rank 0 to
/// rank 1 and one back.
struct Cell {
  std::string op;
  std::uint64_t bytes = 0;
  std::string dtype = "float32";
  std::string memory = "private";
  double seconds = 0.3;  ///< of the back-to-back loops; half of it of single calls (2000 at most)
  /// So many seconds calls go on before anything is measured, in every library.
  double settling = 0;
  CountFrom from = CountFrom::last_start;
};

struct Figures {
  /// Back to back, every rank rewrites its buffer before each call; the median of 11
  /// loops' means.
  double loop_us = 0;
  double p50_us = 0;  ///< one call after a barrier
  double min_us = 0;
  double p99_us = 0;
  std::uint64_t iterations = 0;
};

/// The answer of a library to one cell.
struct CellResult {
  std::optional<Figures> figures;
  std::string reason;  ///< why there are none
  bool skipped = false;
};

/// Seconds until the system has spread the ranks over the cores: it wakes all of them near the
/// waker, and moves those that share a core within 0.2 s (Linux 6.18: 0.03 to 0.17 s). 0 if each
/// rank has a core of its own.
double settling_of(int ranks);

std::string encode(const Cell& cell);
/// Absent for `quit` and the end of the pipe; what is no order is a failure.
Result<std::optional<Cell>> decode_order(const std::string& line);
std::string encode(const Figures& figures);
CellResult decode_answer(const std::string& line);

/// Half the middle ones of an even number of values.
double median(std::vector<double> values);

// A rank that is measured: what every library's worker of ours does with an order.

/// One rank of something that can be measured. One thread.
class TimedRank {
 public:
  virtual ~TimedRank() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Gets ready for calls of the cell, with memory of its kind. Code::unsupported where there is no
  /// such operation.
  virtual Status prepare(const Cell& cell) = 0;
  /// The memory that this rank rewrites before each call.
  virtual MutableBytes written() = 0;
  virtual Status call() = 0;

  // For the measurement itself.
  virtual Status barrier() = 0;
  /// Rank 0's value goes to all.
  virtual Status share(std::int64_t& value) = 0;
  /// The greatest of all ranks' values, place by place, for all.
  virtual Status latest(std::span<std::int64_t> values) = 0;
};

/// Measures one cell; all ranks together.
Result<Figures> measure(TimedRank& rank, const Cell& cell);

/// Carries out the orders in `folder`, or of the standard input where that is empty (see
/// measurement.h), until they end. A rank that has a core of its own stays on it: bound from here
/// on.
Status serve(TimedRank& rank, const std::string& folder);

}  // namespace muster::cli::bench
