/// `muster bench`: how long the engine's collectives take on this machine.
#pragma once

#include <string>
#include <vector>

namespace muster::cli {

/// Arguments after `bench`. Prints a table to standard output; returns the exit code.
int run_bench(const std::vector<std::string>& arguments);

}  // namespace muster::cli
