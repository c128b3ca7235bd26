// SPDX-License-Identifier: BSD-3-Clause
/// `muster run --config`: options from a file.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "muster/status.h"

namespace muster::cli {

/// The options in a TOML file, as words of a command line of `app`: "nnodes = 2" is --nnodes=2,
/// "standalone = true" is --standalone. Names are those of the app's options, in either spelling.
Result<std::vector<std::string>> words_of_config(const CLI::App& app, const std::string& file);

}  // namespace muster::cli
