// SPDX-License-Identifier: BSD-3-Clause
// muster-lab: muster beside other libraries, what is above and below its collectives, and times
// that a model predicts. Built with the benchmarks, not installed.
#include <string>
#include <vector>

#include "faces/cli/commands.h"
#include "lab/bench/lab.h"

int main(int count, char** words) {
  const std::vector<std::string> arguments(words + 1, words + count);
  if (!arguments.empty() && arguments.front() == "bench-worker")
    return muster::cli::bench_worker_command().run({arguments.begin() + 1, arguments.end()});
  return muster::lab::run_lab(arguments);
}
