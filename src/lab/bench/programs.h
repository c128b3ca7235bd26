// SPDX-License-Identifier: BSD-3-Clause
/// The scripts, Pythons and workers that muster-lab starts. Its programs stand beside it in the
/// build folder; workers that are compiled or interpreted when they are asked for are in bench/ of
/// the sources.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "muster/status.h"

namespace muster::lab {

/// A file of bench/ in the sources; those in MUSTER_BENCH_DIR go first.
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
/// Runs a program to its end, with `variables` on top of ours, and returns its standard output. Its
/// standard error is added to that (kept), or goes to ours (shown).
Result<std::string> run_program(
    const std::vector<std::string>& words, Complaints complaints,
    const std::vector<std::pair<std::string, std::string>>& variables = {});

}  // namespace muster::lab
