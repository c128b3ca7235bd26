// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/tree/help.h"

#include <algorithm>
#include <iterator>
#include <sstream>

#include "faces/cli/tree/command.h"

namespace muster::cli {
namespace {

constexpr std::size_t kTextColumn = 26;

/// A name in the left column and its text beside it; below it if the name is too long.
std::string entry(const std::string& name, const std::string& text) {
  std::string line = "  " + name;
  const std::string indent(kTextColumn, ' ');
  if (line.size() + 2 > kTextColumn)
    line += "\n" + indent;
  else
    line.resize(kTextColumn, ' ');
  return line + wrapped(text, kTextColumn) + "\n";
}

std::string name_of(const OptionText& option) {
  std::string text;
  for (const std::string& name : option.names) text += (text.empty() ? "" : ", ") + name;
  return text + (option.value.empty() ? "" : " " + option.value);
}

std::vector<std::string> groups_of(const std::vector<OptionText>& options) {
  std::vector<std::string> groups;
  for (const OptionText& option : options) {
    if (std::find(groups.begin(), groups.end(), option.group) == groups.end())
      groups.push_back(option.group);
  }
  // CLI11's own group, which has --help, comes last.
  std::stable_partition(groups.begin(), groups.end(),
                        [](const std::string& group) { return group != "Options"; });
  return groups;
}

}  // namespace

std::string wrapped(const std::string& text, std::size_t indent) {
  std::string out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!out.empty()) out += "\n" + std::string(indent, ' ');
    std::size_t column = indent;
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      if (column > indent && column + 1 + word.size() > kHelpColumns) {
        out += "\n" + std::string(indent, ' ');
        column = indent;
      }
      if (column > indent) {
        out += " ";
        ++column;
      }
      out += word;
      column += word.size();
    }
  }
  return out;
}

std::vector<OptionText> in_order_of_help(const std::vector<OptionText>& options) {
  std::vector<OptionText> ordered;
  for (const std::string& group : groups_of(options))
    std::copy_if(options.begin(), options.end(), std::back_inserter(ordered),
                 [&](const OptionText& option) { return option.group == group; });
  return ordered;
}

std::string help_of(const CommandText& command) {
  std::string text = wrapped("Usage: " + command.name + " " + command.usage, 4) + "\n\n" +
                     wrapped(command.description) + "\n";
  if (!command.subcommands.empty()) text += "\nCommands:\n";
  for (const CommandText& each : command.subcommands)
    text += entry(short_name(each), each.description);
  if (!command.positionals.empty()) text += "\nArguments:\n";
  for (const OptionText& each : command.positionals) text += entry(each.names[0], each.text);
  std::string group;
  for (const OptionText& option : in_order_of_help(command.options)) {
    if (option.group != group) text += "\n" + option.group + ":\n";
    group = option.group;
    text += entry(name_of(option), option.text);
  }
  return command.footer.empty() ? text : text + "\n" + wrapped(command.footer) + "\n";
}

std::string help_of_all() {
  std::string text =
      "Usage: muster COMMAND [options]\n\nDistributed training on LibTorch tensors.\n";
  std::string group;
  for (const CommandRow& row : command_rows()) {
    if (row.group.empty()) continue;
    if (row.group != group) text += "\n" + row.group + ":\n";
    group = row.group;
    text += entry(row.name, row.summary);
  }
  return text + "\nOptions:\n" + entry("-h, --help", "this text; after a command, its options") +
         entry("--version", "the versions of muster, torch and the compiler, and the commit") +
         "\nExample: four ranks on this machine\n"
         "  muster run --standalone --nproc-per-node 4 ./train\n";
}

}  // namespace muster::cli
