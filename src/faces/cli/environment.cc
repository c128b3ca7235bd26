// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/commands.h"

#include <iostream>
#include <set>

#include "core/base/environment.h"
#include "faces/cli/parse.h"

namespace muster::cli {
namespace {

/// The variables of a row, which may name several: "RANK, WORLD_SIZE".
std::vector<std::string> names_of(const EnvironmentVariable& row) {
  std::vector<std::string> names(1);
  for (const char c : row.name) {
    if (c == ',') names.emplace_back();
    if (c != ',' && c != ' ') names.back() += c;
  }
  return names;
}

void print_set(const std::string& name, std::set<std::string>& printed) {
  if (!printed.insert(name).second) return;
  const auto value = env_text(name.c_str());
  if (value) std::cout << name << "=" << (name == "MUSTER_SECRET" ? "(not shown)" : *value) << "\n";
}

int print_environment(bool all, bool markdown) {
  if (markdown) {
    std::cout << environment_page();
    return 0;
  }
  std::set<std::string> printed;
  for (const EnvironmentSection& section : environment_sections()) {
    if (all) std::cout << section.title << "\n";
    for (const EnvironmentVariable& row : section.variables) {
      if (all)
        std::cout << "  " << row.name << (row.standard.empty() ? "" : " (default: ") << row.standard
                  << (row.standard.empty() ? "" : ")") << "\n      " << row.meaning << "\n";
      else
        for (const std::string& name : names_of(row)) print_set(name, printed);
    }
  }
  return 0;
}

}  // namespace

Command environment_command() {
  struct EnvironmentOptions {
    bool all = false, markdown = false;
  };
  auto app = make_app("muster environment",
                      "The environment variables that muster reads and that are set here.");
  auto options = std::make_shared<EnvironmentOptions>();
  auto* const all =
      app->add_flag("--all", options->all, "all variables that muster reads, with what they do");
  app->add_flag("--markdown", options->markdown, "their page of the documentation")->excludes(all);
  return make_command(app,
                      [options] { return print_environment(options->all, options->markdown); });
}

}  // namespace muster::cli
