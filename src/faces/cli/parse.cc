// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/parse.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <limits>

#include "faces/cli/tree/command.h"
#include "faces/cli/tree/command_text.h"
#include "faces/cli/tree/help.h"
#include "faces/cli/tree/suggestion.h"
#include "jobs/launch/options.h"

namespace muster::cli {
namespace {

class HelpFormatter : public CLI::FormatterBase {
 public:
  std::string make_help(const CLI::App* app, std::string, CLI::AppFormatMode) const override {
    return help_of(describe(*app));
  }
};

/// The app or the subcommand of it that the words have led to.
const CLI::App& reached(const CLI::App& app) {
  const auto parsed = app.get_subcommands();
  return parsed.empty() ? app : reached(*parsed.back());
}

std::string complaint(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& at = reached(app);
  const auto rest = app.remaining(true);
  const bool lacks_subcommand = at.get_require_subcommand_min() > 0;
  const bool extra = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr;
  if (!rest.empty() && (extra || lacks_subcommand)) {
    std::string others;
    for (auto word = rest.begin() + 1; word != rest.end(); ++word) others += " " + *word;
    return not_understood(at, rest.front()) + (others.empty() ? "" : " (nor" + others + ")");
  }
  if (lacks_subcommand) return "a command is missing";
  return in_words(error);
}

}  // namespace

std::shared_ptr<CLI::App> make_app(const std::string& name, const std::string& description) {
  auto app = std::make_shared<CLI::App>(description, name);
  app->formatter(std::make_shared<HelpFormatter>());
  app->set_help_flag("-h,--help", "this text");
  return app;
}

Command make_command(std::shared_ptr<CLI::App> app, std::function<int()> body) {
  const auto run = [app, body = std::move(body)](const std::vector<std::string>& arguments) {
    const auto stop = parse(*app, arguments);
    return stop ? *stop : body();
  };
  return {app, run};
}

std::string not_understood(const CLI::App& app, const std::string& word) {
  const CommandText command = describe(app);
  std::vector<std::string> known;
  if (!word.starts_with("-")) {
    for (const CommandText& each : command.subcommands) known.push_back(short_name(each));
    return "\"" + word + "\" is not understood" + did_you_mean(word, known);
  }
  const std::string name = word.substr(0, word.find('='));
  for (const OptionText& option : command.options)
    known.insert(known.end(), option.names.begin(), option.names.end());
  return "there is no option " + name + did_you_mean(name, known);
}

std::string in_words(const CLI::ParseError& error) {
  const std::string text = error.what();
  // "--nproc-per-node: 1 required TEXT missing"
  const std::size_t name_end = text.find(": 1 required ");
  const bool lacks_value = dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr &&
                           name_end != std::string::npos && text.ends_with(" missing");
  return lacks_value ? text.substr(0, name_end) + " needs a value after it" : text;
}

std::optional<int> parse(CLI::App& app, std::vector<std::string> arguments) {
  std::reverse(arguments.begin(), arguments.end());
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return 0;
  } catch (const CLI::ParseError& error) {
    const std::string name = describe(reached(app)).name;
    std::cerr << name << ": " << complaint(app, error) << "\nSee " << name << " --help.\n";
    return kUsageError;
  }
  return {};
}

CLI::Validator above_zero() {
  const auto check = [](const std::string& text) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    return !text.empty() && *end == '\0' && value > 0 ? std::string()
                                                      : "\"" + text + "\" is not a number above 0";
  };
  return CLI::Validator(check, "ABOVE 0");
}

CLI::Validator whole_above_zero() {
  const auto check = [](const std::string& text) {
    const auto value =
        launch::parse_whole("value", text, 1, std::numeric_limits<std::int64_t>::max());
    return value ? std::string() : "\"" + text + "\" is not a whole number above 0";
  };
  return CLI::Validator(check, "");
}

}  // namespace muster::cli
