// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/commands.h"

#include <cstdio>
#include <iostream>

#include "core/tunables/tunables.h"
#include "faces/cli/parse.h"

namespace muster::cli {
namespace {

constexpr const char* kHelp =
    "muster tunables               the performance numbers in force here, with what overrides "
    "them\n"
    "muster tunables --markdown    their page of the documentation\n"
    "\n"
    "Override some by MUSTER_TUNE=\"link_spin=20us,small_call=64 KiB\", or by lines\n"
    "\"link_spin = 20 us\" of the tuning file (MUSTER_TUNING, ~/.config/muster/tuning).\n";

void print_row(const Tunable& row) {
  const std::int64_t value = value_of(row, tunables(), false),
                     shared = value_of(row, tunables(), true);
  std::string text = text_of(row, value);
  if (shared != value) text += ", " + text_of(row, shared) + " on shared cores";
  const bool overridden = value != value_of(row, default_tunables(), false) ||
                          shared != value_of(row, default_tunables(), true);
  std::printf("%-20s %-36s %s%s\n", std::string(row.name).c_str(), text.c_str(),
              row.scope == Tunable::TunableScope::fixed ? "fixed" : "",
              overridden ? ("overridden; by default " +
                            text_of(row, value_of(row, default_tunables(), false)))
                               .c_str()
                         : "");
}

}  // namespace

int run_tunables(const std::vector<std::string>& arguments) {
  const std::string argument = arguments.empty() ? "" : arguments.front();
  if (argument == "--help" || argument == "-h") {
    std::cout << kHelp;
    return 0;
  }
  if (argument == "--markdown" && arguments.size() == 1) {
    std::cout << tunables_page();
    return 0;
  }
  if (!arguments.empty()) {
    std::cerr << "muster tunables: \"" << arguments.back() << "\" is not understood\n\n" << kHelp;
    return kUsageError;
  }
  if (const Status& failure = tunables_failure(); !failure) {
    std::cerr << "muster tunables: " << failure.message() << "\n";
    return kUsageError;
  }
  for (const Tunable& row : tunable_rows()) print_row(row);
  return 0;
}

}  // namespace muster::cli
