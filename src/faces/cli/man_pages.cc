// SPDX-License-Identifier: BSD-3-Clause
// `muster man-pages`: pages for man(1), written from the apps of the commands. `make man` calls it.
#include <filesystem>
#include <fstream>
#include <iostream>

#include "faces/cli/commands.h"
#include "faces/cli/parse.h"
#include "faces/cli/tree/command_text.h"
#include "faces/cli/tree/help.h"

namespace muster::cli {
namespace {

/// Text that roff prints as it stands.
std::string plain(const std::string& text) {
  std::string out;
  for (const char letter : text) {
    const bool at_front = out.empty() || out.back() == '\n';
    if (at_front && (letter == '.' || letter == '\'')) out += "\\&";
    if (letter == '\\')
      out += "\\e";
    else if (letter == '-')
      out += "\\-";
    else
      out += letter;
    if (letter == '\n') out += ".br\n";
  }
  return out;
}

std::string bold(const std::string& text) { return "\\fB" + plain(text) + "\\fR"; }

std::string dashed(std::string name) {
  for (char& letter : name)
    if (letter == ' ') letter = '-';
  return name;
}

std::string heading(const std::string& name, const std::string& summary) {
  return ".TH " + dashed(name) + " 1 \"\" \"muster " MUSTER_VERSION "\" \"muster\"\n.SH NAME\n" +
         plain(dashed(name)) + " \\- " + plain(summary) + "\n";
}

std::string options_of(const CommandText& command, bool with_headings) {
  std::string text, group = "Options";
  for (const OptionText& each : command.positionals)
    text += ".TP\n" + bold(each.names[0]) + "\n" + plain(each.text) + "\n";
  for (const OptionText& option : in_order_of_help(command.options)) {
    if (with_headings && option.group != group) text += ".SS " + plain(option.group) + "\n";
    group = option.group;
    text += ".TP\n";
    for (std::size_t i = 0; i < option.names.size(); ++i)
      text += (i == 0 ? "" : ", ") + bold(option.names[i]);
    if (!option.value.empty()) text += " \\fI" + plain(option.value) + "\\fR";
    text += "\n" + plain(option.text) + "\n";
  }
  return text;
}

std::string page_of(const CommandText& command, const std::string& summary) {
  std::string text = heading(command.name, summary) + ".SH SYNOPSIS\n" + bold(command.name) + " " +
                     plain(command.usage) + "\n.SH DESCRIPTION\n" + plain(command.description) +
                     "\n.SH OPTIONS\n" + options_of(command, true);
  if (!command.subcommands.empty()) text += ".SH COMMANDS\n";
  for (const CommandText& each : command.subcommands)
    text += ".TP\n" + bold(each.name + " " + each.usage) + "\n" + plain(each.description) +
            "\n.RS\n" + options_of(each, false) + ".RE\n";
  if (!command.footer.empty()) text += ".SH NOTES\n" + plain(command.footer) + "\n";
  return text + ".SH SEE ALSO\n.BR muster (1)\n";
}

std::string page_of_all() {
  std::string text = heading("muster", "distributed training on LibTorch tensors") +
                     ".SH SYNOPSIS\n" + bold("muster") +
                     " COMMAND [options]\n.SH DESCRIPTION\nStarts, watches and measures jobs of "
                     "ranks that train a model together. Each command has a page of its own.\n";
  std::string group;
  for (const CommandRow& row : command_rows()) {
    if (row.group.empty()) continue;
    if (row.group != group) text += ".SH " + plain(row.group) + "\n";
    group = row.group;
    text += ".TP\n" + bold("muster-" + row.name) + "(1)\n" + plain(row.summary) + "\n";
  }
  return text;
}

/// Whether it is written whole.
bool write_page(const std::filesystem::path& folder, const std::string& name,
                const std::string& text) {
  std::ofstream file(folder / (name + ".1"));
  file << text << std::flush;
  if (!file) std::cerr << "muster man-pages: cannot write " << folder / (name + ".1") << "\n";
  return file.good();
}

int write_pages(const std::string& folder) {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (!write_page(folder, "muster", page_of_all())) return 1;
  for (const CommandRow& row : command_rows()) {
    if (row.group.empty()) continue;
    if (!write_page(folder, "muster-" + row.name, page_of(describe(*row.make().app), row.summary)))
      return 1;
  }
  return 0;
}

}  // namespace

Command man_pages_command() {
  auto app = make_app("muster man-pages", "Writes the manual pages of all commands.");
  auto folder = std::make_shared<std::string>();
  app->add_option("folder", *folder, "where to write muster.1, muster-run.1 and the others")
      ->required();
  return make_command(app, [folder] { return write_pages(*folder); });
}

}  // namespace muster::cli
