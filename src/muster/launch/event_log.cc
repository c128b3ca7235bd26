#include "muster/launch/event_log.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <ctime>
#include <mutex>
#include <nlohmann/json.hpp>

#include "muster/base/file_limit.h"
#include "muster/base/log.h"
#include "muster/base/own_files.h"
#include "muster/base/socket_address.h"
#include "muster/base/thread_start.h"
#include "muster/clock.h"

namespace muster::launch {
namespace {

constexpr std::size_t kMostQueued = std::size_t{1} << 20;  // limit: memory for what was not written
// limit: of a launcher that ends, for the next bytes to be taken, and for all
constexpr Duration kPatienceWithReader = std::chrono::seconds(2);
constexpr Duration kPatienceAtEnd = std::chrono::seconds(10);
constexpr int kPollMs = 1000;  // limit: then the end of the log is looked at

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

struct EventLog::EventQueue {
  Descriptor file;
  std::string name, job, host;
  std::mutex mutex;  // guards all below; never held during a write
  std::condition_variable changed;
  std::string waiting;      // lines; the first may have been written in part
  std::size_t dropped = 0;  // lines, since the queue was full
  std::uint64_t written = 0;
  bool failed = false;  // the last write; nothing is tried until a line comes
  bool closing = false;
  std::string trouble;  // the last that was logged

  std::string line_of(const std::string& event, const std::vector<Field>& fields) const;
  void put(const std::string& line);
  void run();
  void write_some(std::unique_lock<std::mutex>& lock);
};

std::string EventLog::EventQueue::line_of(const std::string& event,
                                          const std::vector<Field>& fields) const {
  nlohmann::ordered_json line = {
      {"time", time_text()}, {"event", event}, {"job", job}, {"host", host}};
  for (const auto& [name_of_field, value] : fields)
    std::visit([&, key = name_of_field](const auto& each) { line[key] = each; }, value);
  // Bytes that are not valid UTF-8 (in a host name or a worker's message) are replaced.
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

/// Under the lock.
void EventLog::EventQueue::put(const std::string& line) {
  failed = false;
  changed.notify_all();
  if (dropped > 0 || waiting.size() + line.size() > kMostQueued) {
    ++dropped;
  } else {
    waiting += line;
  }
}

void EventLog::EventQueue::run() {
  std::unique_lock lock(mutex);
  while (true) {
    changed.wait(lock, [this] { return closing || (!waiting.empty() && !failed); });
    if (waiting.empty() || failed) return;
    write_some(lock);
    if (waiting.empty() && dropped > 0) {
      const auto count = static_cast<std::int64_t>(std::exchange(dropped, 0));
      put(line_of("events_dropped", {{"count", count}}));
    }
  }
}

/// At most one line at once: others may append to the same file.
void EventLog::EventQueue::write_some(std::unique_lock<std::mutex>& lock) {
  const std::string text = waiting.substr(0, waiting.find('\n') + 1);
  lock.unlock();
  const FileSizeSignalBlock block;
  const ssize_t done = ::write(file.get(), text.data(), text.size());
  const int error = errno;
  lock.lock();
  if (done >= 0) {
    waiting.erase(0, static_cast<std::size_t>(done));
    written += static_cast<std::uint64_t>(done);
    trouble.clear();
    changed.notify_all();
  } else if (error == EAGAIN) {  // others share the descriptor, and have set O_NONBLOCK
    lock.unlock();
    pollfd room{file.get(), POLLOUT, 0};
    static_cast<void>(::poll(&room, 1, kPollMs));  // the write says what there is
    lock.lock();
  } else if (error != EINTR) {
    failed = true;
    changed.notify_all();
    const std::string said = "events of the job cannot be written to " + name + ": " +
                             errno_text(error) + "; they are put again with the next one";
    if (std::exchange(trouble, said) != said) log(LogLevel::warning, said);
  }
}

Result<EventLog> EventLog::open(const std::string& path, std::string job, std::string host) {
  auto file = open_own_file(path, O_WRONLY | O_CREAT | O_APPEND, {.name = "the file of events"});
  if (!file) return file.status().with_context("--events");
  return to(std::move(*file), path, std::move(job), std::move(host));
}

Result<EventLog> EventLog::to(Descriptor descriptor, const std::string& name, std::string job,
                              std::string host) {
  auto queue = std::make_shared<EventQueue>();
  queue->file = std::move(descriptor);
  queue->name = name;
  queue->job = std::move(job);
  queue->host = std::move(host);
  auto thread = start_thread("the thread that writes events", [queue] { queue->run(); });
  if (!thread) return thread.status();
  thread->detach();
  return EventLog(std::move(queue));
}

EventLog::~EventLog() {
  if (!queue_) return;
  EventQueue& queue = *queue_;
  std::unique_lock lock(queue.mutex);
  queue.closing = true;
  queue.failed = false;
  queue.changed.notify_all();
  const TimePoint limit = steady_clock().now() + kPatienceAtEnd;
  std::uint64_t seen = 0;
  do {
    seen = queue.written;
    queue.changed.wait_for(lock, kPatienceWithReader, [&] {
      return queue.waiting.empty() || queue.failed || queue.written != seen;
    });
  } while (!queue.waiting.empty() && !queue.failed && queue.written != seen &&
           steady_clock().now() < limit);
  const auto lost =
      queue.dropped + static_cast<std::size_t>(std::ranges::count(queue.waiting, '\n'));
  lock.unlock();
  if (lost > 0)
    log(LogLevel::warning, std::to_string(lost) + (lost == 1 ? " event" : " events") +
                               " of the job were not written to " + queue.name +
                               ", which takes no more");
}

void EventLog::write(const std::string& event, const std::vector<Field>& fields) {
  const std::string line = queue_->line_of(event, fields);
  const std::lock_guard lock(queue_->mutex);
  queue_->put(line);
}

}  // namespace muster::launch
