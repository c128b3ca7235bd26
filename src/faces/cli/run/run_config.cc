// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/run/run_config.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <set>

#include "core/base/descriptor.h"
#include "faces/cli/parse.h"

#define TOML_EXCEPTIONS 0
#include <toml++/toml.h>

namespace muster::cli {
namespace {

std::string text_of_value(const toml::node& value) {
  if (const auto* text = value.as_string()) return text->get();
  if (const auto* number = value.as_integer()) return std::to_string(number->get());
  if (const auto* number = value.as_floating_point()) return fmt::format("{}", number->get());
  return {};
}

/// The word of one line; empty for a flag that is off.
Result<std::string> word_of_entry(const CLI::Option& option, const toml::node& value) {
  const std::string name = "--" + option.get_lnames().front();
  if (option.get_items_expected_max() == 0) {
    if (const auto* flag = value.as_boolean()) return flag->get() ? name : std::string();
    return Status(Code::invalid_argument, name + " is true or false");
  }
  if (value.is_string() || value.is_integer() || value.is_floating_point())
    return name + "=" + text_of_value(value);
  return Status(Code::invalid_argument, name + " takes one string or number");
}

/// The library's words, and what they mean if a string runs to the end of its line.
std::string in_words(const toml::parse_error& error) {
  std::string text(error.description());
  if (text.find("unescaped control characters") != std::string::npos)
    text += "; a string ends in its line: is the closing quote missing?";
  return text;
}

}  // namespace

Result<std::vector<std::string>> words_of_config(const CLI::App& app, const std::string& file) {
  const auto refused = [&](const toml::source_region& at, std::string_view why) {
    return Status(Code::invalid_argument,
                  fmt::format("--config {}, line {}: {}", file, at.begin.line, why));
  };
  const toml::parse_result parsed = toml::parse_file(file);
  if (!parsed) {
    const toml::parse_error& error = parsed.error();
    if (error.source().begin.line > 0) return refused(error.source(), in_words(error));
    const std::string why = ::access(file.c_str(), R_OK) == 0
                                ? std::string(error.description())
                                : "cannot read the file: " + errno_text(errno);
    return Status(Code::invalid_argument, fmt::format("--config {}: {}", file, why));
  }
  std::vector<std::string> words;
  std::set<const CLI::Option*> seen;
  for (const auto& [key, value] : parsed.table()) {
    const std::string name = "--" + std::string(key.str());
    const CLI::Option* option = app.get_option_no_throw(name);
    if (value.is_table())
      return refused(key.source(),
                     "options stand in no section, and [" + name.substr(2) + "] is one");
    if (option == nullptr) return refused(key.source(), not_understood(app, name));
    if (option == app.get_help_ptr() || name == "--config")
      return refused(key.source(), name + " is for the command line");
    if (!seen.insert(option).second) return refused(key.source(), name + " is there twice");
    auto word = word_of_entry(*option, value);
    if (!word) return refused(key.source(), word.status().message());
    if (!word->empty()) words.push_back(std::move(*word));
  }
  return words;
}

}  // namespace muster::cli
