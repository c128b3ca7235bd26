// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/log/log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "core/base/environment.h"
#include "core/base/log/log_format.h"
#include "core/base/log/log_lines.h"
#include "core/base/log/log_queue.h"

namespace muster {
namespace {

thread_local int log_rank = -1;

std::atomic<LogLevel>& level() {
  static std::atomic<LogLevel> current = log_level_from_environment();
  return current;
}

class RankFlag final : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg&, const std::tm&, spdlog::memory_buf_t& out) override {
    if (log_rank < 0) return;
    const std::string text = " rank " + std::to_string(log_rank);
    out.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<spdlog::custom_flag_formatter> clone() const override {
    return std::make_unique<RankFlag>();
  }
};

/// Under the lock of the lines.
class LinesSink final : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
  void sink_it_(const spdlog::details::log_msg& message) override {
    if (form_ == log_format::LineForm::console) {
      spdlog::memory_buf_t line;
      formatter_->format(message, line);
      return log_lines::put({line.data(), line.size()});
    }
    const auto level = spdlog::level::to_string_view(message.level);
    log_lines::put(log_format::line_text(
        form_, {.time = message.time,
                .level = {level.data(), level.size()},
                .rank = log_rank,
                .message = {message.payload.data(), message.payload.size()}}));
  }
  void flush_() override {}

  const log_format::LineForm form_ = log_format::form_from_environment();
};

/// Never destroyed: threads may log while the process ends.
spdlog::logger& logger() {
  static auto* const made = [] {
    auto* fresh = new spdlog::logger("muster", std::make_shared<LinesSink>());
    fresh->set_error_handler(
        [](const std::string&) {});  // its own writes to standard error, and may block there
    auto formatter = std::make_unique<spdlog::pattern_formatter>();
    formatter->add_flag<RankFlag>('*').set_pattern("[%H:%M:%S.%e %l%*] %v");
    fresh->set_formatter(std::move(formatter));
    fresh->set_level(spdlog::level::trace);
    return fresh;
  }();
  return *made;
}

spdlog::level::level_enum spdlog_level(LogLevel level) {
  switch (level) {
    case LogLevel::error: return spdlog::level::err;
    case LogLevel::warning: return spdlog::level::warn;
    case LogLevel::info: return spdlog::level::info;
    case LogLevel::debug: return spdlog::level::debug;
    case LogLevel::trace: return spdlog::level::trace;
  }
  return spdlog::level::trace;
}

}  // namespace

LogLevel log_level() { return level().load(std::memory_order_relaxed); }
void set_log_level(LogLevel wanted) { level().store(wanted, std::memory_order_relaxed); }
void set_log_rank(int rank) { log_rank = rank; }

void log_by_thread() {
  const log_lines::Lock lock;
  log_lines::leave_to_thread();
}

void log(LogLevel wanted, std::string_view message) {
  if (!logs(wanted)) return;
  const log_lines::Lock lock;
  if (log_queue::put(wanted, log_rank, message)) return;
  logger().log(spdlog_level(wanted), spdlog::string_view_t(message.data(), message.size()));
}

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
