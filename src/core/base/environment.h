// SPDX-License-Identifier: BSD-3-Clause
/// Environment variables: reading them, with errors that name the variable and the text that it
/// held, and the table of all that muster reads.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "muster/status.h"

namespace muster {

/// Unset and empty are both "not there".
std::optional<std::string> env_text(const char* name);
/// Overwrites the variable's text where it lies, so that neither /proc/PID/environ nor a core dump
/// shows it, and removes the variable. Not while other threads use the environment.
void wipe_env(const char* name);
/// Absent: `std::nullopt`. Not a whole decimal number in [low, high]: Code::invalid_argument naming
/// variable, text and range.
Result<std::optional<std::int64_t>> env_integer(const char* name, std::int64_t low,
                                                std::int64_t high);
/// 1, true, yes, on / 0, false, no, off in any case.
Result<std::optional<bool>> env_flag(const char* name);

// The one table of environment variables: every variable that muster reads, its default and what
// it does. `muster environment` prints it, `docs/user/environment.md` is printed from it, and
// `tools/check_environment` refuses a variable that is read without a row.
//
// To add a variable: read it by the functions above, write its row in `environment.cc`, then
// `muster environment --markdown > docs/user/environment.md`.

struct EnvironmentVariable {
  std::string_view name;      ///< several that belong together: "RANK, WORLD_SIZE"
  std::string_view standard;  ///< what holds if it is unset; empty: nothing
  std::string_view meaning;   ///< a sentence or two
};

struct EnvironmentSection {
  std::string_view title;
  std::span<const EnvironmentVariable> variables;
};

std::span<const EnvironmentSection> environment_sections();
/// The table as docs/user/environment.md.
std::string environment_page();

}  // namespace muster
