// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/commands.h"

#include <cstdio>
#include <iostream>

#include "core/tunables/tunables.h"
#include "faces/cli/parse.h"

namespace muster::cli {
namespace {

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

int print_tunables(bool markdown) {
  if (markdown) {
    std::cout << tunables_page();
    return 0;
  }
  if (const Status& failure = tunables_failure(); !failure) {
    std::cerr << "muster tunables: " << failure.message() << "\n";
    return kUsageError;
  }
  for (const Tunable& row : tunable_rows()) print_row(row);
  return 0;
}

}  // namespace

Command tunables_command() {
  auto app = make_app("muster tunables",
                      "The performance numbers in force here, with what overrides them.");
  auto markdown = std::make_shared<bool>(false);
  app->add_flag("--markdown", *markdown, "their page of the documentation");
  app->footer(
      "Override some by MUSTER_TUNE=\"link_spin=20us,small_call=64 KiB\", or by lines \"link_spin "
      "= "
      "20 us\" of the tuning file (MUSTER_TUNING, ~/.config/muster/tuning).");
  return make_command(app, [markdown] { return print_tunables(*markdown); });
}

}  // namespace muster::cli
