// SPDX-License-Identifier: BSD-3-Clause
/// `muster run` and `muster launch`: from words to RunOptions. The parser's library throws; nothing
/// leaves these functions but values.
#pragma once

#include <string>
#include <vector>

#include "jobs/launch/options.h"

namespace muster::cli {

enum class RunFlavour { run, launch };  ///< torchrun's options, torch.distributed.launch's

/// The parsed command line: options to run with, or text to print and an exit code.
struct ParsedRun {
  launch::RunOptions options;
  bool finished = false;  ///< print `text` and leave with `exit_code`
  int exit_code = 0;
  std::string text;
};

/// `arguments` without the program's and the subcommand's name. The first word that is no option is
/// the program; all after it is the program's, untouched. Dashes in option names may be
/// underscores. Numbers of cores and GPUs are resolved here.
ParsedRun parse_run(RunFlavour flavour, const std::vector<std::string>& arguments);

}  // namespace muster::cli
