// SPDX-License-Identifier: BSD-3-Clause
/// The tuning file: lines `KEY = VALUE` that override what muster has chosen. `muster bench --tune`
/// writes it, people may read and edit it:
///
///   version = 1
///   small_call = 64 KiB                            # a row of docs/user/tunables.md
///   network.all_reduce.4 = bruck <= 16384, slices    # core/collective/select/tuning.h
///
/// `#` begins a comment.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/status.h"

namespace muster {

inline constexpr int kTuningVersion = 1;

struct TuningLine {
  int number;
  std::string_view key, value;
};

/// The path in MUSTER_TUNING, else muster/tuning in the user's folder for settings
/// (XDG_CONFIG_HOME, ~/.config). Empty if there is no such folder, or MUSTER_TUNING is "off".
std::string tuning_path();
/// The file's text; nothing if there is no file, which is an error if MUSTER_TUNING names it.
Result<std::optional<std::string>> read_tuning_file();

/// Its lines but "version". `name` is what the text comes from, for errors.
Result<std::vector<TuningLine>> tuning_lines(std::string_view text, const std::string& name);
/// `name`, the line, what is wrong there, and what to do.
Status wrong_tuning_line(const std::string& name, int line, const std::string& what);

std::string_view trimmed(std::string_view text);
/// Trimmed each.
std::vector<std::string_view> parts_of(std::string_view text, char separator);
std::optional<std::uint64_t> number_of_text(std::string_view text);
/// "65536", "64 KiB", "1MiB".
std::optional<std::uint64_t> size_of_text(std::string_view text);
std::string text_of_size(std::uint64_t bytes);

}  // namespace muster
