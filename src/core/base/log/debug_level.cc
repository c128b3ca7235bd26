#include "core/base/log/debug_level.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cstdio>
#include <optional>
#include <string>

#include "core/base/env.h"

namespace muster {
namespace {

std::string lower_case(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

struct LevelName {
  std::string_view text;
  LogLevel level;
};
constexpr std::array<LevelName, 10> kNames{{{"error", LogLevel::error},
                                            {"warning", LogLevel::warning},
                                            {"info", LogLevel::info},
                                            {"debug", LogLevel::debug},
                                            {"trace", LogLevel::trace},
                                            {"fatal", LogLevel::error},
                                            {"0", LogLevel::info},
                                            {"1", LogLevel::warning},
                                            {"2", LogLevel::error},
                                            {"3", LogLevel::error}}};

std::optional<LogLevel> level_of(std::string_view text) {
  const auto wanted = lower_case(text);
  for (const LevelName& name : kNames)
    if (wanted == name.text) return name.level;
  return std::nullopt;
}

std::atomic<DebugLevel>& current() {
  static std::atomic<DebugLevel> level = [] {
    const auto found = debug_level_from_environment();
    if (!found) std::fprintf(stderr, "muster: %s\n", found.status().message().c_str());
    return found ? *found : DebugLevel::OFF;
  }();
  return level;
}

}  // namespace

DebugLevel get_debug_level() { return current().load(std::memory_order_relaxed); }

void set_debug_level(DebugLevel level) {
  current().store(level, std::memory_order_relaxed);
  set_log_level(log_level_from_environment());
}

Result<DebugLevel> debug_level_from_environment() {
  const auto text = env_text("TORCH_DISTRIBUTED_DEBUG");
  if (!text) return DebugLevel::OFF;
  const auto wanted = lower_case(*text);
  if (wanted == "off") return DebugLevel::OFF;
  if (wanted == "info") return DebugLevel::INFO;
  if (wanted == "detail") return DebugLevel::DETAIL;
  return Status(Code::invalid_argument, "the environment variable TORCH_DISTRIBUTED_DEBUG is \"" +
                                            *text + "\"; it must be OFF, INFO or DETAIL");
}

LogLevel log_level_for(std::string_view cpp_log_level, DebugLevel debug) {
  const auto level = level_of(cpp_log_level).value_or(LogLevel::warning);
  if (level != LogLevel::info) return level;
  if (debug == DebugLevel::DETAIL) return LogLevel::trace;
  return debug == DebugLevel::INFO ? LogLevel::debug : LogLevel::info;
}

LogLevel log_level_from_environment() {
  if (const auto text = env_text("MUSTER_LOG_LEVEL")) {
    if (const auto level = level_of(*text)) return *level;
    std::fprintf(
        stderr,
        "muster: MUSTER_LOG_LEVEL is \"%s\"; expected error, warning, info, debug or trace\n",
        text->c_str());
  }
  return log_level_for(env_text("TORCH_CPP_LOG_LEVEL").value_or("WARNING"), get_debug_level());
}

}  // namespace muster
