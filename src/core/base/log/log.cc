#include "core/base/log/log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <memory>
#include <string>

#include "core/base/log/debug_level.h"
#include "core/base/log/log_lines.h"

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
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    log_lines::put({line.data(), line.size()});
  }
  void flush_() override {}
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
  logger().log(spdlog_level(wanted), spdlog::string_view_t(message.data(), message.size()));
}

}  // namespace muster
