/// `muster doctor`: what this machine offers and what is wrong with it.
#pragma once

#include <string>
#include <vector>

namespace muster::cli {

/// Arguments after `doctor`, which takes none but --help. Prints to standard output. 0 where
/// nothing is in the way of a job, 1 otherwise, 2 for arguments.
int run_doctor(const std::vector<std::string>& arguments);

}  // namespace muster::cli
