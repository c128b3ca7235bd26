/// `muster bench-worker`: the engine itself under measurement, without tensors; all ranks of one
/// rank count.
#pragma once

#include <string>
#include <vector>

namespace muster::cli::bench {

/// Arguments after `bench-worker`; returns the exit code. Started by `muster bench`, not by people.
int run_engine_worker(const std::vector<std::string>& arguments);

}  // namespace muster::cli::bench
