// SPDX-License-Identifier: BSD-3-Clause
/// The libraries that muster is compared with: how their ranks start on this machine.
#pragma once

#include <string>
#include <vector>

#include "faces/cli/bench/timed_library.h"
#include "muster/status.h"

namespace muster::lab {

using cli::bench::StartPlan;

/// "gloo", "openmpi", "mpich", "impi".
const std::vector<std::string>& other_libraries();

/// How the ranks of "muster" or of another library start. An error names what is missing on this
/// machine and what to install. The programs of MPI are compiled into `folder` with the library's
/// own compiler.
Result<StartPlan> plan_library(const std::string& library, const cli::bench::RankOptions& options,
                               const std::string& folder);
/// muster's calls on tensors over backend mpi, started as the plain program on `mpi` is, one of
/// "openmpi", "mpich" and "impi".
Result<StartPlan> plan_muster_on_mpi(const cli::bench::RankOptions& options, const std::string& mpi,
                                     const std::string& folder);
/// Why the library is not measured with so many ranks; empty if it is.
std::string why_left_out(const std::string& library, int ranks);

/// A script of bench/ that measures by itself, with these arguments.
Result<StartPlan> plan_script(const std::string& name, const std::vector<std::string>& arguments);

}  // namespace muster::lab
