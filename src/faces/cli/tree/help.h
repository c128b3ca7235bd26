// SPDX-License-Identifier: BSD-3-Clause
/// What `muster --help` and `muster COMMAND --help` print: options in groups, in lines of one
/// width.
#pragma once

#include <string>

#include "faces/cli/tree/command_text.h"

namespace muster::cli {

inline constexpr std::size_t kHelpColumns = 80;

/// The text in lines of at most `kHelpColumns`, all but the first indented by `indent`. A newline
/// in it stays one.
std::string wrapped(const std::string& text, std::size_t indent = 0);

/// The options by group; --help and others that have none of their own come last.
std::vector<OptionText> in_order_of_help(const std::vector<OptionText>& options);

std::string help_of(const CommandText& command);
/// All commands in groups.
std::string help_of_all();

}  // namespace muster::cli
