// SPDX-License-Identifier: BSD-3-Clause
/// What CLI11 knows of a command, in words.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace muster::cli {

struct OptionText {
  std::vector<std::string> names;    ///< "-o", "--output"; of a positional one its only name
  std::string value;                 ///< what to write after it: "FILE"; empty for a flag
  std::string text;                  ///< what it does, with its default
  std::string group;                 ///< heading in the help
  std::vector<std::string> choices;  ///< all values that it takes, if they are few and known
};

struct CommandText {
  std::string name;         ///< "muster checkpoint ls"
  std::string description;  ///< without what the options say
  std::string usage;        ///< what follows the name: "[options] program"
  std::string footer;
  bool passes_on = false;  ///< its first word that is no option is a program, the rest that one's
  std::vector<OptionText> positionals, options;
  std::vector<CommandText> subcommands;
};

/// Options without a group are left out. A spelling with underscores is left out beside the one
/// with dashes.
CommandText describe(const CLI::App& app);

/// The type of an option whose text names its values, for completion: `values` is "shm,tcp".
std::string offered(const std::string& values);

/// The last word of its name: "ls".
std::string short_name(const CommandText& command);

}  // namespace muster::cli
