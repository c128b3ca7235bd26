/// `muster doctor`: what this machine offers and what is wrong with it.
#pragma once

namespace muster::cli {

/// Prints to standard output. 0 where nothing is in the way of a job, 1 otherwise.
int run_doctor();

}  // namespace muster::cli
