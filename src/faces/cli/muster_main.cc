// SPDX-License-Identifier: BSD-3-Clause
/// The `muster` command.
#include <fcntl.h>

#include <cerrno>
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "core/base/descriptor.h"
#include "faces/cli/commands.h"
#include "faces/cli/parse.h"
#include "faces/cli/run/run_join.h"
#include "faces/cli/tree/help.h"
#include "faces/cli/tree/suggestion.h"
#include "faces/cli/version.h"

namespace {

/// A stream that the caller has closed (`>&-`) leads nowhere from now on. Otherwise the next file
/// that is opened would have its number, and be written to.
bool open_streams() {
  for (int stream = 0; stream <= 2; ++stream) {
    if (::fcntl(stream, F_GETFD) >= 0) continue;
    if (::open("/dev/null", stream == 0 ? O_RDONLY : O_WRONLY) != stream) return false;
  }
  return true;
}

int refuse(const std::string& why) {
  std::cerr << "muster: " << why << "\nSee muster --help.\n";
  return muster::cli::kUsageError;
}

int run_command(const std::vector<std::string>& arguments) {
  const std::string command = arguments.empty() ? "--help" : arguments.front();
  const std::vector<std::string> rest(arguments.begin() + (arguments.empty() ? 0 : 1),
                                      arguments.end());
  if (const auto* row = muster::cli::find_command(command)) return row->make().run(rest);
  const bool version = command == "--version",
             help = command == "--help" || command == "-h" || command == "help";
  if ((version || help) && !rest.empty())
    return refuse("\"" + rest.front() + "\" is not understood after " + command +
                  "; muster COMMAND --help tells of a command");
  if (version) {
    std::cout << muster::cli::version_text();
    return 0;
  }
  if (help) {
    std::cout << muster::cli::help_of_all();
    return arguments.empty() ? muster::cli::kUsageError : 0;
  }
  std::vector<std::string> known = {"--version", "--help"};
  for (const auto& row : muster::cli::command_rows())
    if (!row.group.empty()) known.push_back(row.name);
  const char* const kind = command.starts_with("-") ? "option" : "command";
  return refuse("there is no " + std::string(kind) + " \"" + command + "\"" +
                muster::cli::did_you_mean(command, known));
}

/// A command whose output could not be written (no space, say) fails, even if it has succeeded
/// otherwise.
int checked_output(int exit_code) {
  errno = 0;
  const bool written = std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.flush();
  if (written || errno == EPIPE) return exit_code;
  std::cerr << "muster: not all could be written to standard output: "
            << (errno == 0 ? "it has failed" : muster::errno_text(errno)) << "\n";
  return exit_code == 0 ? 1 : exit_code;
}

}  // namespace

int main(int count, char** words) {
  if (!open_streams()) return 1;
  const std::vector<std::string> arguments(words + 1, words + count);
  muster::cli::hide_token(count, words);
  return checked_output(run_command(arguments));
}
