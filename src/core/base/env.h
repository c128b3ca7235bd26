/// Environment variables, parsed with errors that name the variable and the text that it held.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

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

}  // namespace muster
