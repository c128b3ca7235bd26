/// Where that stands what `muster bench` starts, and how it is run. Its programs are beside the
/// command; the workers that are compiled or interpreted when they are asked for are in
/// share/muster/bench next to that folder, in a build folder as where it is installed.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "muster/status.h"

namespace muster::cli::bench {

/// The path of another program in the folder of this one. Whether it exists is not looked at.
std::string program_beside(const std::string& name);

/// A worker of another library, by the name that it has in bench/ of the sources; those in
/// MUSTER_BENCH_DIR go first.
Result<std::string> bench_file(const std::string& name);

/// One that has torch: `given`, else what MUSTER_PYTHON says, else the first of
/// `launch::python_places` that has it.
Result<std::string> find_python(const std::string& given = "");

/// Variables that a Python needs to import muster: from `package`, the folder that holds it, else
/// from the build folder that this program stands in. None where there is neither: an installed
/// package is found without.
std::vector<std::pair<std::string, std::string>> variables_to_import_muster(
    const std::string& package = "");

enum class Complaints { kept, shown };
/// Runs a program to its end, with `variables` on top of ours; what it printed. What it writes to
/// its standard error is kept with that, or shown on ours.
Result<std::string> run_program(
    const std::vector<std::string>& words, Complaints complaints,
    const std::vector<std::pair<std::string, std::string>>& variables = {});

}  // namespace muster::cli::bench
