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

/// What each algorithm took at one size, microseconds: in one look at all of them, or the least or
/// the middle of several.
struct Lap {
  std::uint64_t bytes = 0;
  std::map<collective::Algorithm, double> us;

  /// Takes what was less in another lap of that size.
  void take_less(const Lap& other);
};

/// The sizes at which one algorithm of `row` should give way to the next, so that all laps (of
/// growing sizes) take least; borders stand half-way between measured sizes. Algorithms that win
/// nowhere do not appear.
std::vector<collective::Tuning::SizeLimit> fit(std::span<const collective::Algorithm> row,
                                               const std::vector<Lap>& laps);

/// What each algorithm took in the middle of several laps of one size.
Lap middle_of(const std::vector<Lap>& laps);

/// A selected algorithm that is not good enough: the other one and how many times as fast it is.
struct Upset {
  collective::Algorithm better;
  double times = 1;
};
struct AlgorithmVerdict {
  std::optional<Upset> upset;
  bool clear = true;  ///< whether more laps would hardly change it for any algorithm; of no lap too
};
inline constexpr double kTolerance = 1.10;
/// Of laps of one size, in each of which the algorithms ran one after the other. An upset is what
/// was more than `tolerance` times as fast in most of them: the middle counts and not the least,
/// since a rare good moment may halve a time. Clear is what so many more than half of the laps
/// agree upon as chance seldom brings together.
AlgorithmVerdict judge(const std::vector<Lap>& laps, collective::Algorithm selected,
                       double tolerance = kTolerance);

/// Whether so many laps, measured since so many `rounds` seemed to upset the selection, are enough:
/// at least 4 for each round, at most 30, in between until their verdict is clear.
bool looked_enough(const std::vector<Lap>& laps, std::size_t rounds,
                   collective::Algorithm selected);

/// Measures where the crossover points are and writes them to `path`, beside what stands there of
/// others. Prints them.
Status tune(const Contest& contest, const std::string& path);
/// Prints every cell, its middle times, and for every agreed number of the table of tunables how
/// many of the cells that it decides are right. Fails where a selected algorithm is slower than
/// another by more than 10 %, also when measured again by ranks started anew after all others,
/// until that is clear (`looked_enough`).
Status check_selection(const Contest& contest);

}  // namespace muster::cli::bench
