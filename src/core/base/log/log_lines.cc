// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/log/log_lines.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/environment.h"
#include "core/base/log/log_file.h"
#include "core/base/log/log_format.h"
#include "core/base/log/log_queue.h"
#include "core/base/log/queued_writer.h"

namespace muster::log_lines {
namespace {

// A process that ends gives the reader of standard error so long to take the next bytes.
constexpr auto kPatienceAtExit = std::chrono::seconds(2);

struct Lines {
  std::mutex lock;
  QueuedWriter* writer = nullptr;
  std::vector<QueuedWriter*> left;  // earlier writers; a thread may still write their last lines
};

// Never destroyed: threads may log while the process ends.
Lines& lines() {
  static Lines* const one = new Lines;
  return *one;
}

/// Writes what fits now, as ::write.
ssize_t write_now(std::string_view text) {
  struct stat file {};
  if (::fstat(STDERR_FILENO, &file) != 0) return -1;
  if (S_ISREG(file.st_mode)) return ::write(STDERR_FILENO, text.data(), text.size());
  if (S_ISSOCK(file.st_mode))
    return ::send(STDERR_FILENO, text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  // The flag O_NONBLOCK belongs to the open file, which other processes share: this is one of our
  // own.
  const Descriptor own(
      ::open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_APPEND | O_CLOEXEC | O_NOCTTY));
  if (own) return ::write(own.get(), text.data(), text.size());
  pollfd room{STDERR_FILENO, POLLOUT, 0};
  if (::poll(&room, 1, 0) == 0) {
    errno = EAGAIN;
    return -1;
  }
  return ::write(STDERR_FILENO, text.data(), std::min<std::size_t>(text.size(), PIPE_BUF));
}

/// To the file of MUSTER_LOG_FILE, or if there is none, to standard error. Each writer opens the
/// file for itself: a forked child's lines go to the file of its own process.
std::function<ssize_t(std::string_view)> writing() {
  const auto path = env_text("MUSTER_LOG_FILE");
  if (!path) return write_now;
  const auto megabytes = env_integer("MUSTER_LOG_FILE_MB", 1, 1'000'000);
  const auto kept = env_integer("MUSTER_LOG_FILES_KEPT", 1, 1000);
  RotatingLog::Rotation limits;
  for (const Status& status : {megabytes.status(), kept.status()})
    if (!status) std::fprintf(stderr, "muster: %s\n", status.message().c_str());
  if (megabytes && *megabytes) limits.bytes = static_cast<std::uint64_t>(**megabytes) << 20;
  if (kept && *kept) limits.kept = static_cast<int>(**kept);
  return [file = std::make_shared<RotatingLog>(*path, limits)](std::string_view text) {
    const ssize_t written = file->write(text);
    return written < 0 && errno == EBADF ? write_now(text) : written;
  };
}

std::string note_of_dropped(std::size_t count) {
  const std::string lines = std::to_string(count) + " lines were dropped: ";
  const auto form = log_format::form_from_environment();
  if (form == log_format::LineForm::console)
    return "[muster log] " + lines + "nobody read standard error\n";
  const std::string text = lines + "they could not be written in time";
  return log_format::line_text(
      form,
      {.time = std::chrono::system_clock::now(), .level = "warning", .rank = -1, .message = text});
}

QueuedWriter* new_writer(bool may_block) {
  return new QueuedWriter({.thread = "the thread that writes the log",
                           .fd = STDERR_FILENO,
                           .write = writing(),
                           .may_block = may_block,
                           .most = kMostWaiting,
                           .dropped_note = note_of_dropped});
}

void flush_at_exit() {
  QueuedWriter* writer = nullptr;
  {
    const Lock hold;
    writer = lines().writer;
  }
  writer->finish(kPatienceAtExit, Duration::max());
}

void before_fork() { lines().lock.lock(); }
void after_fork_in_parent() { lines().lock.unlock(); }
// The parent writes the lines that wait, by a thread that the child does not have. The child's copy
// of the old writer is kept and never used: the fork may have copied its mutex locked.
void after_fork_in_child() {
  Lines& all = lines();
  all.left.push_back(all.writer);
  all.writer = new_writer(false);
  log_queue::leave_to_parent();
  all.lock.unlock();
}

bool arm() {
  lines().writer = new_writer(false);
  const int armed = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  return armed == 0 && std::atexit(flush_at_exit) == 0;
}

}  // namespace

Lock::Lock() {
  static const bool armed = arm();
  static_cast<void>(armed);
  lines().lock.lock();
}

Lock::~Lock() { lines().lock.unlock(); }

void put(std::string_view line) { lines().writer->put(line); }

void leave_to_thread() {
  Lines& all = lines();
  all.left.push_back(all.writer);
  all.writer = new_writer(true);
}

}  // namespace muster::log_lines
