// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/log/log_format.h"

#include <limits.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/base/environment.h"

namespace muster::log_format {
namespace {

const std::string& host_of_log() {
  static const std::string host = [] {
    char name[HOST_NAME_MAX + 1] = {};
    return std::string(::gethostname(name, HOST_NAME_MAX) == 0 ? name : "unknown");
  }();
  return host;
}

std::string time_text(std::chrono::system_clock::time_point time) {
  const auto since = time.time_since_epoch();
  const auto whole = std::chrono::floor<std::chrono::seconds>(since);
  const auto rest = std::chrono::duration_cast<std::chrono::milliseconds>(since - whole);
  const auto seconds = static_cast<time_t>(whole.count());
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  char text[40];
  const std::size_t length = std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
  std::snprintf(text + length, sizeof text - length, ".%03dZ", static_cast<int>(rest.count()));
  return text;
}

LineForm read_form() {
  const auto given = env_text("MUSTER_LOG_FORMAT");
  if (given && *given == "json") return LineForm::json;
  if (given && *given != "text")
    std::fprintf(stderr, "muster: MUSTER_LOG_FORMAT is \"%s\"; expected text or json\n",
                 given->c_str());
  return env_text("MUSTER_LOG_FILE") ? LineForm::file : LineForm::console;
}

}  // namespace

LineForm form_from_environment() {
  static const LineForm form = read_form();
  return form;
}

std::string line_text(LineForm form, const LogLine& line) {
  const std::string time = time_text(line.time);
  if (form == LineForm::json) {
    nlohmann::ordered_json object = {
        {"time", time}, {"level", line.level}, {"host", host_of_log()}, {"pid", ::getpid()}};
    if (line.rank >= 0) object["rank"] = line.rank;
    object["message"] = line.message;
    // Names of others may be no UTF-8; what is not ASCII is escaped.
    return object.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace) + "\n";
  }
  std::string text = "[" + time + " " + std::string(line.level) + " " + host_of_log() + " " +
                     std::to_string(::getpid());
  if (line.rank >= 0) text += " rank " + std::to_string(line.rank);
  return text.append("] ").append(line.message).append("\n");
}

}  // namespace muster::log_format
