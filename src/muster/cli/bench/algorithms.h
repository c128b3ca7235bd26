/// muster's algorithms against each other: the tuning of their selection, and the check of it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "muster/base/status.h"
#include "muster/collective/tuning.h"

namespace muster::cli::bench {

struct Contest {
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

/// What each algorithm took at one size, microseconds: the best of the rounds.
struct Lap {
  std::uint64_t bytes = 0;
  std::map<collective::Algorithm, double> us;

  /// Takes what was less in another lap of that size.
  void take_less(const Lap& other);
};

/// The sizes at which one algorithm of `row` should give way to the next, so that all laps (of growing sizes) take least; borders stand
/// half-way between measured sizes. Algorithms that win nowhere do not appear.
std::vector<collective::Tuning::Step> fit(std::span<const collective::Algorithm> row, const std::vector<Lap>& laps);

/// A lap in which the selected algorithm is not good enough: the other one and how many times as fast it is.
struct Upset {
  collective::Algorithm better;
  double times = 1;
};
inline constexpr double kTolerance = 1.10;
std::optional<Upset> upset(const Lap& lap, collective::Algorithm selected, double tolerance = kTolerance);

/// Measures where the crossover points are and writes them to `path`, beside what stands there of others. Prints them.
Status tune(const Contest& contest, const std::string& path);
/// Prints every cell, its least times. Fails where a selected algorithm is slower than another by more than 10 %, also when measured again
/// by ranks started anew.
Status check_selection(const Contest& contest);

}  // namespace muster::cli::bench
