// SPDX-License-Identifier: BSD-3-Clause
/// The forms of a line of the log. Private to the log.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

namespace muster::log_format {

enum class LineForm {
  console,  ///< [20:35:01.317 info rank 0] ...
  file,     ///< [2026-11-30T20:35:01.317Z info node0 4711 rank 0] ...
  json      ///< {"time":"2026-11-30T20:35:01.317Z","level":"info","host":"node0",...}
};

/// MUSTER_LOG_FORMAT, `text` or `json`; text is `file` if MUSTER_LOG_FILE names one. Anything else
/// is complained of on standard error, and counts as text. Read once.
LineForm form_from_environment();

struct LogLine {
  std::chrono::system_clock::time_point time;
  std::string_view level;
  int rank = -1;  ///< -1: of no rank
  std::string_view message;
};
/// With its end. Not for `console`.
std::string line_text(LineForm form, const LogLine& line);

}  // namespace muster::log_format
