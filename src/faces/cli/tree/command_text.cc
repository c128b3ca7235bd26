// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/tree/command_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

namespace muster::cli {
namespace {

// CLI11 spells the type of an option and what checks and changes it as "TEXT:{shm,tcp}" or
// "FLOAT:FLOAT in [0.1 - 60]".

/// Begins the type of an option whose text has its values in words.
constexpr const char* kOffered = "VALUE:";

/// shm and tcp.
std::vector<std::string> choices_in(const std::string& type) {
  std::vector<std::string> choices;
  const std::size_t open = type.rfind('{'), close = type.rfind('}');
  if (open == std::string::npos || close == std::string::npos || close < open) return choices;
  std::istringstream parts(type.substr(open + 1, close - open - 1));
  for (std::string choice; std::getline(parts, choice, ',');) choices.push_back(choice);
  return choices;
}

std::string value_of(const CLI::Option& option) {
  if (!option.get_option_text().empty()) return option.get_option_text();
  if (option.get_items_expected_max() == 0 || option.get_type_size_max() == 0) return {};
  const std::string type = option.get_type_name();
  const bool checked = type.find_first_of("{ ") != std::string::npos;
  const std::string name = checked ? type.substr(0, type.find(':')) : type;
  const std::string shown = name.empty() || name == "TEXT" ? "VALUE" : name;
  return option.get_items_expected_min() == 0 ? "[" + shown + "]" : shown;
}

std::string text_of(const CLI::Option& option, const std::vector<std::string>& choices) {
  std::string text = option.get_description();
  if (!choices.empty() && !option.get_type_name().starts_with(kOffered))
    text += fmt::format(". One of {}", fmt::join(choices, ", "));
  std::string standard = option.get_default_str();
  if (standard.starts_with('[') && standard.ends_with(']'))
    standard = standard.substr(1, standard.size() - 2);
  if (!standard.empty()) text += ". Default " + standard;
  return text;
}

/// The name and its spelling with underscores are one.
void add_name(std::vector<std::string>& names, const std::string& name) {
  std::string dashed = name;
  std::replace(dashed.begin(), dashed.end(), '_', '-');
  if (std::find(names.begin(), names.end(), dashed) == names.end()) names.push_back(name);
}

OptionText describe(const CLI::Option& option) {
  OptionText shown;
  if (option.get_positional() && !option.nonpositional()) {
    shown.names = {option.get_name(true, false)};
    shown.text = option.get_description();
    shown.choices = choices_in(option.get_type_name());
    return shown;
  }
  for (const std::string& name : option.get_snames()) shown.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) add_name(shown.names, "--" + name);
  shown.choices = choices_in(option.get_type_name());
  shown.value = value_of(option);
  shown.text = text_of(option, shown.choices);
  shown.group = option.get_group();
  return shown;
}

}  // namespace

CommandText describe(const CLI::App& app) {
  CommandText shown;
  const CLI::App* const parent = app.get_parent();
  shown.name = (parent == nullptr ? "" : parent->get_name() + " ") + app.get_name();
  shown.description = app.get_description();
  shown.footer = app.get_footer();
  shown.passes_on = app.get_prefix_command();
  for (const CLI::Option* option : app.get_options({})) {
    if (option->get_group().empty() || option == app.get_help_ptr()) continue;
    auto& list = option->nonpositional() ? shown.options : shown.positionals;
    list.push_back(describe(*option));
  }
  if (app.get_help_ptr() != nullptr) shown.options.push_back(describe(*app.get_help_ptr()));
  for (const CLI::App* sub : app.get_subcommands(std::function<bool(const CLI::App*)>{}))
    shown.subcommands.push_back(describe(*sub));
  // The words that are passed on to a program are not among the options.
  shown.usage = shown.passes_on             ? "[options] program [arguments of the program...]"
                : shown.subcommands.empty() ? "[options]"
                                            : "COMMAND [options]";
  for (const OptionText& positional : shown.positionals) shown.usage += " " + positional.names[0];
  return shown;
}

std::string offered(const std::string& values) { return kOffered + ("{" + values + "}"); }

std::string short_name(const CommandText& command) {
  return command.name.substr(command.name.rfind(' ') + 1);
}

}  // namespace muster::cli
