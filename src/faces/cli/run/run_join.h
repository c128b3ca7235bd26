// SPDX-License-Identifier: BSD-3-Clause
/// `muster run --print-join` and `--join`: a job's first node prints one line, and the other nodes
/// come by it.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "jobs/launch/options.h"
#include "muster/status.h"

namespace muster::cli {

/// The options as they stood on the command line.
struct JoinWords {
  std::string token;   ///< "-": the first line of standard input
  bool print = false;  ///< the token may be printed to what is no terminal
};

/// Refuses options of `app` that do not go together with these. Called before any is understood.
Status refuse_beside_join(const CLI::App& app, const JoinWords& words);

/// Fills in what the token leads to: it asks the first node. Or makes this the first node, if
/// nothing says where the nodes meet and the line can be printed.
Status take_join(const CLI::App& app, const JoinWords& words, launch::RunOptions& options);

/// Overwrites the value of --join in the arguments of this process, which every user of the machine
/// can read.
void hide_token(int count, char** words);

/// The words as a shell takes them, each after a space.
std::string shell_words(const std::vector<std::string>& words);

}  // namespace muster::cli
