#include "muster/launch/event_log.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>

#include "muster/base/own_files.h"

namespace muster::launch {
namespace {

/// "2026-11-27T08:00:00.123Z".
std::string time_text() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  char text[32];
  const std::size_t length = std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
  const auto part = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch());
  char rest[8];
  std::snprintf(rest, sizeof rest, ".%03dZ", static_cast<int>(part.count() % 1000));
  return std::string(text, length) + rest;
}

}  // namespace

Result<EventLog> EventLog::open(const std::string& path, std::string job, std::string host) {
  auto file = open_own_file(path, O_WRONLY | O_CREAT | O_APPEND, {.name = "the file of events"});
  if (!file) return file.status().with_context("--events");
  return to(std::move(*file), std::move(job), std::move(host));
}

EventLog EventLog::to(Descriptor descriptor, std::string job, std::string host) {
  EventLog log;
  log.file_ = std::move(descriptor);
  log.job_ = std::move(job);
  log.host_ = std::move(host);
  return log;
}

void EventLog::write(const std::string& event, const std::vector<Field>& fields) const {
  if (!file_) return;
  nlohmann::ordered_json line = {
      {"time", time_text()}, {"event", event}, {"job", job_}, {"host", host_}};
  for (const auto& [name, value] : fields)
    std::visit([&, key = name](const auto& each) { line[key] = each; }, value);
  // Bytes that are not valid UTF-8 (in a host name or a worker's message) are replaced.
  const std::string text =
      line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  [[maybe_unused]] const ssize_t written = ::write(file_.get(), text.data(), text.size());
}

}  // namespace muster::launch
