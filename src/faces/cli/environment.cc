// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/commands.h"

#include <iostream>
#include <set>

#include "core/base/environment.h"
#include "faces/cli/parse.h"

namespace muster::cli {
namespace {

constexpr const char* kEnvironmentHelp =
    "muster environment               the variables that muster reads and that are set here\n"
    "muster environment --all         all variables that muster reads, with what they do\n"
    "muster environment --markdown    their page of the documentation\n";

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

}  // namespace

int run_environment(const std::vector<std::string>& arguments) {
  const std::string argument = arguments.empty() ? "" : arguments.front();
  if (argument == "--help" || argument == "-h") {
    std::cout << kEnvironmentHelp;
    return 0;
  }
  const bool all = argument == "--all";
  if (arguments.size() > 1 || (!arguments.empty() && !all && argument != "--markdown")) {
    std::cerr << "muster environment: \"" << arguments.back() << "\" is not understood\n\n"
              << kEnvironmentHelp;
    return kUsageError;
  }
  if (argument == "--markdown") {
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

}  // namespace muster::cli
