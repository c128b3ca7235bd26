// SPDX-License-Identifier: BSD-3-Clause
/// muster's algorithms against each other: the tuning of their selection, and the check of it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/collective/select/tuning.h"
#include "muster/status.h"

namespace muster::cli::bench {

struct ComparisonOptions {
  std::vector<std::string> ops;      ///< those with one algorithm are passed over
  std::vector<std::uint64_t> sizes;  ///< bytes, growing
  std::vector<int> ranks;
  std::vector<std::string> transports;  ///< "shm": the region of the host; "tcp": links
  std::string dtype = "float32";
  std::string memory = "private";
  double seconds = 0.1;
  int rounds = 3;
  bool threads = false;
};

/// The time of each algorithm at one size, microseconds: from one measurement of all of them, or
/// the least or the median of several.
struct AlgorithmTimes {
  std::uint64_t bytes = 0;
  std::map<collective::Algorithm, double> us;

  /// Takes what was less in another measurement of that size.
  void take_less(const AlgorithmTimes& other);
};

/// The sizes at which one algorithm of `row` should give way to the next, so that all measurements
/// (of growing sizes) take least; borders stand half-way between measured sizes. Algorithms that
/// win nowhere do not appear.
std::vector<collective::Tuning::SizeLimit> fit(std::span<const collective::Algorithm> row,
                                               const std::vector<AlgorithmTimes>& measurements);

/// The median of each algorithm over several measurements of one size.
AlgorithmTimes middle_of(const std::vector<AlgorithmTimes>& measurements);

/// A selected algorithm that is not good enough: the other one and how many times as fast it is.
struct FasterAlgorithm {
  collective::Algorithm better;
  double times = 1;
};
struct AlgorithmVerdict {
  std::optional<FasterAlgorithm> faster;
  bool clear = true;  ///< whether more measurements would hardly change it; also without any
};
inline constexpr double kTolerance = 1.10;
/// Judges measurements of one size, in each of which the algorithms ran one after the other. An
/// algorithm is faster if it was more than `tolerance` times as fast in most of them: the median
/// counts and not the least, because a rare good moment may halve a time. The verdict is clear if
/// more of the measurements agree than chance would make agree.
AlgorithmVerdict judge(const std::vector<AlgorithmTimes>& measurements,
                       collective::Algorithm selected, double tolerance = kTolerance);

/// Whether the measurements are enough since the first `rounds` of them seemed to show a faster
/// algorithm: at least 4 for each round, at most 100, in between until their verdict is clear.
bool measured_enough(const std::vector<AlgorithmTimes>& measurements, std::size_t rounds,
                     collective::Algorithm selected);

/// Measures where the crossover points are and writes them to `path`, beside what stands there of
/// others. Prints them.
Status tune(const ComparisonOptions& options, const std::string& path);
/// Prints every cell, its middle times, and for every agreed number of the table of tunables how
/// many of the cells that it decides are right. Fails where a selected algorithm is slower than
/// another by more than 10 %, also when measured again by ranks started anew after all others,
/// until that is clear (`measured_enough`).
Status check_selection(const ComparisonOptions& options);

}  // namespace muster::cli::bench
