// SPDX-License-Identifier: BSD-3-Clause
/// Words of other programs on a terminal.
#pragma once

#include <string>
#include <string_view>

namespace muster::cli {

/// The text with spaces for what a terminal would take for a command (C0 but the newline, DEL, C1)
/// and question marks for bytes that are no UTF-8. Traces and checkpoints may be anybody's.
std::string printable(std::string_view text);
/// The same on one line, so that it makes no rows of its own.
std::string printable_line(std::string_view text);

/// Says on standard error what is wrong, and with which command. Returns the exit code, 1.
int complain(const char* command, const std::string& text);

}  // namespace muster::cli
