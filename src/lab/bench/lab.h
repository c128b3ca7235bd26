// SPDX-License-Identifier: BSD-3-Clause
/// The command muster-lab.
#pragma once

#include <string>
#include <vector>

namespace muster::lab {

/// Prints a table to standard output; returns the exit code. May become another program.
int run_lab(const std::vector<std::string>& arguments);

}  // namespace muster::lab
