#include "muster/base/log_lines.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <mutex>
#include <string>

#include "muster/base/descriptor.h"
#include "muster/base/file_limit.h"
#include "muster/base/thread_start.h"
#include "muster/clock.h"

namespace muster::log_lines {
namespace {

// A process that ends gives the reader of standard error so long to take the next bytes.
constexpr auto kPatienceAtExit = std::chrono::seconds(2);
// How often the writer looks whether standard error has become another file meanwhile.
constexpr int kLookMilliseconds = 200;  // limit: the patience of who ends a process

struct Lines {
  std::mutex lock;
  std::string waiting;
  std::size_t dropped = 0;
  std::size_t written = 0;  // bytes taken from the queue so far
  bool writer = false;      // a thread looks after the queue
};

// Never destroyed: threads may log while the process ends.
Lines& lines() {
  static Lines* const one = new Lines;
  return *one;
}

/// Writes what fits now; says how much. What standard error refuses for good counts as written.
std::size_t write_now(std::string_view text) {
  struct stat file {};
  if (::fstat(STDERR_FILENO, &file) != 0) return text.size();
  const FileSizeSignalBlock block;
  ssize_t done = 0;
  if (S_ISREG(file.st_mode)) {
    done = ::write(STDERR_FILENO, text.data(), text.size());
  } else if (S_ISSOCK(file.st_mode)) {
    done = ::send(STDERR_FILENO, text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  } else {
    // The flag O_NONBLOCK belongs to the open file, which other processes share: this is one of our
    // own.
    const Descriptor own(
        ::open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_APPEND | O_CLOEXEC | O_NOCTTY));
    if (own) {
      done = ::write(own.get(), text.data(), text.size());
    } else {
      pollfd room{STDERR_FILENO, POLLOUT, 0};
      if (::poll(&room, 1, 0) == 0) return 0;
      done = ::write(STDERR_FILENO, text.data(), std::min<std::size_t>(text.size(), PIPE_BUF));
    }
  }
  if (done >= 0) return static_cast<std::size_t>(done);
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : text.size();
}

/// Under the lock. Whether all that waits is written.
bool drain(Lines& all) {
  while (!all.waiting.empty()) {
    const std::size_t done = write_now(all.waiting);
    if (done == 0) return false;
    all.waiting.erase(0, done);
    all.written += done;
    if (all.waiting.empty() && all.dropped > 0) {
      all.waiting = "[muster log] " + std::to_string(all.dropped) +
                    " lines were dropped: nobody read standard error\n";
      all.dropped = 0;
    }
  }
  return true;
}

/// Waits for the reader of standard error, which may have become another file meanwhile.
void await_room() {
  pollfd room{STDERR_FILENO, POLLOUT, 0};
  ::poll(&room, 1, kLookMilliseconds);
}

void write_what_waits() {
  for (;; await_room()) {
    Lines& all = lines();
    const std::lock_guard hold(all.lock);
    if (!drain(all)) continue;
    all.writer = false;
    return;
  }
}

void flush_at_exit() {
  std::size_t seen = 0;
  for (TimePoint limit{};; await_room()) {
    Lines& all = lines();
    const std::lock_guard hold(all.lock);
    if (drain(all)) return;
    const TimePoint now = steady_clock().now();
    if (limit == TimePoint() || all.written != seen) limit = now + kPatienceAtExit;
    seen = all.written;
    if (now >= limit) return;
  }
}

void before_fork() { lines().lock.lock(); }
void after_fork_in_parent() { lines().lock.unlock(); }
// What waits is the parent's to write, by a thread that the child does not have.
void after_fork_in_child() {
  Lines& all = lines();
  all.waiting.clear();
  all.dropped = 0;
  all.writer = false;
  all.lock.unlock();
}

/// Under the lock, once something has to wait.
void begin_to_wait(Lines& all) {
  static const bool flushes = std::atexit(flush_at_exit) == 0;
  static_cast<void>(flushes);
  if (all.writer) return;
  // If no thread can be started, the next call that logs writes the waiting lines.
  auto writer = start_thread("the thread that writes the log", write_what_waits);
  if (!writer.ok()) return;
  all.writer = true;
  writer->detach();
}

}  // namespace

Lock::Lock() {
  static const int armed = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  static_cast<void>(armed);
  lines().lock.lock();
}

Lock::~Lock() { lines().lock.unlock(); }

void put(std::string_view line) {
  Lines& all = lines();
  if (!all.writer && drain(all)) {
    line.remove_prefix(write_now(line));
    if (line.empty()) return;
  }
  if (all.waiting.size() + line.size() > kMostWaiting) {
    ++all.dropped;
  } else {
    all.waiting.append(line);
  }
  begin_to_wait(all);
}

}  // namespace muster::log_lines
