#include "muster/launch/event_log.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>

#include "muster/base/file_limit.h"
#include "muster/base/own_files.h"
#include "muster/base/socket_address.h"

namespace muster::launch {
namespace {

constexpr std::size_t kMostKept = std::size_t{1} << 20;  // limit: memory for what was not written

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

Status EventLog::write(const std::string& event, const std::vector<Field>& fields) {
  if (!file_) return {};
  nlohmann::ordered_json line = {
      {"time", time_text()}, {"event", event}, {"job", job_}, {"host", host_}};
  for (const auto& [name, value] : fields)
    std::visit([&, key = name](const auto& each) { line[key] = each; }, value);
  // Bytes that are not valid UTF-8 (in a host name or a worker's message) are replaced.
  unwritten_ += line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  const FileSizeSignalBlock block;
  while (!unwritten_.empty()) {
    const ssize_t written = ::write(file_.get(), unwritten_.data(), unwritten_.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int error = errno;
      // Whole lines go, so that what is written later can be read.
      if (unwritten_.size() > kMostKept) unwritten_.erase(0, unwritten_.find('\n') + 1);
      return Status(Code::exhausted, "events of the job cannot be written: " + errno_text(error));
    }
    unwritten_.erase(0, static_cast<std::size_t>(written));
  }
  return {};
}

}  // namespace muster::launch
