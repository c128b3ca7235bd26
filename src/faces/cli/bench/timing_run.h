// SPDX-License-Identifier: BSD-3-Clause
/// One run of `muster bench`: every cell in every library, a round after the other, as a table.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "faces/cli/bench/results.h"
#include "faces/cli/bench/timed_library.h"
#include "muster/status.h"

namespace CLI {
class App;
}

namespace muster::cli::bench {

/// Every operation that can be measured.
const std::vector<std::string>& known_operations();

struct TimingOptions {
  std::vector<std::string> ops{"all_reduce"};
  std::vector<std::uint64_t> sizes{8, 1024, 65536, 1048576, 16777216};
  std::vector<int> ranks{2};
  std::string dtype = "float32";
  std::vector<std::string> memories{"private"};  ///< of muster's ranks, each a measurement
  double seconds = 0.3;
  int rounds = 0;  ///< 0: the command's own default
  std::string json;
  RankOptions rank;  ///< but for the number of ranks
};

/// The options that fill them, with checks.
void add_timing_options(CLI::App& app, TimingOptions& options);
/// Why this machine cannot run them; empty if it can.
std::string why_not_here(const TimingOptions& options);

/// The libraries of a run. "muster" is always the first.
struct Libraries {
  std::vector<std::string> others;
  /// How the ranks of a library start, with their pipes in `folder`.
  std::function<Result<StartPlan>(const std::string& library, const RankOptions& options,
                                  const std::string& folder)>
      plan;
  /// Why a library has no part in groups of so many ranks; empty if it has.
  std::function<std::string(const std::string& library, int ranks)> why_left_out;
};

/// Prints a table and appends to `json`; the rows. An error if muster has no figure at all.
Result<std::vector<Row>> time_libraries(const TimingOptions& options, const Libraries& libraries);

}  // namespace muster::cli::bench
