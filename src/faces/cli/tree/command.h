// SPDX-License-Identifier: BSD-3-Clause
/// The commands of `muster` as one tree, of which dispatch, help, completion and man pages are
/// made.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace muster::cli {

/// A command: its options as CLI11 has them, and what it does.
struct Command {
  std::shared_ptr<CLI::App> app;
  /// Gets the arguments after the command's name, prints to standard output and returns the exit
  /// code: 0, 1 after an error, 2 for arguments that are not understood.
  std::function<int(const std::vector<std::string>&)> run;
};

/// An app whose help is printed as that of all commands. `name` begins with "muster ".
std::shared_ptr<CLI::App> make_app(const std::string& name, const std::string& description);

/// A command that parses its arguments, refuses what it does not understand, and then does `body`.
Command make_command(std::shared_ptr<CLI::App> app, std::function<int()> body);

/// One row of `muster --help`.
struct CommandRow {
  std::string name, group, summary;
  Command (*make)();
};

/// In the order of the help, rows of a group together. A row without a group is for programs and is
/// not shown.
const std::vector<CommandRow>& command_rows();
const CommandRow* find_command(const std::string& name);

}  // namespace muster::cli
