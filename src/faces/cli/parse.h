// SPDX-License-Identifier: BSD-3-Clause
/// One way for every command to refuse what it does not understand.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

namespace muster::cli {

inline constexpr int kUsageError = 2;

/// None where the arguments are fine, else what to exit with: 0 where help was asked for and
/// printed, else `kUsageError`, with the command and the reason on standard error.
std::optional<int> parse(CLI::App& app, std::vector<std::string> arguments);

/// Says that the app does not know the word, and what may have been meant.
std::string not_understood(const CLI::App& app, const std::string& word);

/// The library's words for what is wrong, or ours where it names the option's type instead.
std::string in_words(const CLI::ParseError& error);

/// As CLI::PositiveNumber, whose errors print the largest double in 309 digits.
CLI::Validator above_zero();
CLI::Validator whole_above_zero();

}  // namespace muster::cli
