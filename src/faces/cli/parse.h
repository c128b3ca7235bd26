// SPDX-License-Identifier: BSD-3-Clause
/// One way for every command to refuse what it does not understand.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "jobs/launch/options.h"

namespace muster::cli {

inline constexpr int kUsageError = 2;

/// None where the arguments are fine, else what to exit with: 0 where help was asked for and
/// printed, else `kUsageError`, with the reason on standard error.
inline std::optional<int> parse(CLI::App& app, std::vector<std::string> arguments) {
  std::reverse(arguments.begin(), arguments.end());
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsageError;
  }
  return {};
}

/// As CLI::PositiveNumber, whose errors print the largest double in 309 digits.
inline CLI::Validator above_zero() {
  const auto check = [](const std::string& text) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    return !text.empty() && *end == '\0' && value > 0 ? std::string()
                                                      : "\"" + text + "\" is not a number above 0";
  };
  return CLI::Validator(check, "ABOVE 0");
}
inline CLI::Validator whole_above_zero() {
  const auto check = [](const std::string& text) {
    const auto value =
        launch::parse_whole("value", text, 1, std::numeric_limits<std::int64_t>::max());
    return value ? std::string() : "\"" + text + "\" is not a whole number above 0";
  };
  return CLI::Validator(check, "");
}

}  // namespace muster::cli
