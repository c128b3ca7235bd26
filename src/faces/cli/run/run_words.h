// SPDX-License-Identifier: BSD-3-Clause
/// Spellings of the options of `muster run`: those of torchrun and of mpirun.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

namespace muster::cli {

/// The message if the first word that was not understood is an option of torchrun that muster does
/// not have.
std::optional<std::string> refusal_of(const std::vector<std::string>& rest);

/// Whether an option was given, be it empty: on the command line, by --config or by PET_*.
bool was_given(const CLI::App& app, const std::string& name);

/// Logs a warning for each PET_ variable that is no option's, but nearly one's.
void warn_of_misspelt_variables(const CLI::App& app);

/// "--nproc-per-node,--nproc_per_node": both spellings of a name, or of several.
std::string spellings(const std::string& names);

/// Makes "-np" before the program "-n": the library would read it as "-n p".
void replace_np(const CLI::App& app, std::vector<std::string>& words);

}  // namespace muster::cli
