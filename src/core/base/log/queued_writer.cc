// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/log/queued_writer.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "core/base/process/limits.h"
#include "core/base/threads/thread_start.h"

namespace muster {
namespace {

/// The most that one write takes.
constexpr std::size_t kLongestPiece = std::size_t{64} << 10;  // limit: of a line in one piece

// Then the writer tries again even if poll has heard of no room: the descriptor may have become
// another file.
constexpr int kPollMilliseconds = 200;  // limit: the patience of who ends a process
constexpr std::size_t kPieceBytes = PIPE_BUF;

}  // namespace

struct QueuedWriter::Shared {
  /// The result of ::write, and errno.
  struct Wrote {
    ssize_t done = 0;
    int error = 0;
    bool found_no_room() const {
      return done == 0 || (done < 0 && (error == EAGAIN || error == EWOULDBLOCK));
    }
    bool was_refused() const { return done < 0 && !found_no_room() && error != EINTR; }
  };

  explicit Shared(QueueOptions given) : options(std::move(given)) {
    if (options.own) options.fd = options.own.get();
    if (!options.write)
      options.write = [fd = options.fd](std::string_view text) {
        return ::write(fd, text.data(), text.size());
      };
  }

  QueueOptions options;
  // Guards all below. The thread releases it while it writes; a writing caller of `put` or `finish`
  // holds it. Only one of them writes: a caller does so only while no thread does (no thread was
  // started, or nothing waits for it), so lines keep their order.
  std::mutex mutex;
  std::condition_variable changed;
  std::string waiting;      // the first line may have been written in part
  std::size_t at = 0;       // where in `waiting` the unwritten bytes begin
  std::size_t dropped = 0;  // pieces, since there was no room
  std::uint64_t written = 0;
  bool failed = false;  // the last write, and its bytes are kept: tried again with the next ones
  int error = 0;        // the last, until a write succeeds
  bool has_thread = false;
  bool closing = false;

  bool empty() const { return at == waiting.size(); }
  std::string_view piece() const;
  void append(std::string_view text);
  Wrote write(std::string_view text) const;
  int new_error(const Wrote& wrote);
  void take(const Wrote& wrote);
  int write_here();
  void run();
};

/// The lines that fit in one piece, or else a part of one.
std::string_view QueuedWriter::Shared::piece() const {
  const std::string_view left = std::string_view(waiting).substr(at);
  if (left.size() <= kPieceBytes) return left;
  const std::size_t last = left.rfind('\n', kPieceBytes - 1);
  if (last != std::string_view::npos) return left.substr(0, last + 1);
  return left.substr(0, std::min(left.find('\n'), kLongestPiece - 1) + 1);
}

void QueuedWriter::Shared::append(std::string_view text) {
  if (at == waiting.size() || at > kLongestPiece) waiting.erase(0, std::exchange(at, 0));
  waiting.append(text);
}

QueuedWriter::Shared::Wrote QueuedWriter::Shared::write(std::string_view text) const {
  const FileSizeSignalBlock block;
  const ssize_t done = options.write(text);
  return {done, errno};
}

/// Under the lock. An error to tell the owner of, or 0.
int QueuedWriter::Shared::new_error(const Wrote& wrote) {
  if (wrote.done > 0) error = 0;
  return wrote.was_refused() && std::exchange(error, wrote.error) != wrote.error ? wrote.error : 0;
}

/// Under the lock.
void QueuedWriter::Shared::take(const Wrote& wrote) {
  if (wrote.was_refused()) {
    failed = options.keeps_refused;
    if (!failed) at = waiting.size();
  } else if (wrote.done > 0) {
    at += static_cast<std::size_t>(wrote.done);
    written += static_cast<std::uint64_t>(wrote.done);
  }
  if (empty() && dropped > 0) append(options.dropped_note(std::exchange(dropped, 0)));
}

/// Under the lock, while no thread writes. Returns an error to tell the owner of, or 0.
int QueuedWriter::Shared::write_here() {
  int to_tell = 0;
  while (!empty() && !failed) {
    const Wrote wrote = write(piece());
    if (const int error_number = new_error(wrote); error_number != 0) to_tell = error_number;
    take(wrote);
    if (wrote.found_no_room()) break;
  }
  return to_tell;
}

void QueuedWriter::Shared::run() {
  std::unique_lock lock(mutex);
  while (true) {
    changed.wait(lock, [this] { return closing || (!empty() && !failed); });
    if (empty() || failed) break;
    const std::string text(piece());
    lock.unlock();
    const Wrote wrote = write(text);
    if (wrote.found_no_room()) {
      pollfd room{options.fd, POLLOUT, 0};
      static_cast<void>(::poll(&room, 1, kPollMilliseconds));  // the next write says what there is
    }
    lock.lock();
    // The owner hears of an error before `finish` sees the end of the writing.
    if (const int error_number = new_error(wrote); error_number != 0 && options.on_error) {
      lock.unlock();
      options.on_error(error_number);
      lock.lock();
    }
    take(wrote);
    changed.notify_all();
    if (!options.on_written) continue;
    lock.unlock();
    options.on_written();
    lock.lock();
  }
  lock.unlock();
  options.own.reset();
}

QueuedWriter::QueuedWriter(QueueOptions options)
    : queue_(std::make_shared<Shared>(std::move(options))) {}

QueuedWriter::~QueuedWriter() {
  const std::lock_guard lock(queue_->mutex);
  queue_->closing = true;
  queue_->changed.notify_all();
}

bool QueuedWriter::put(std::string_view text) {
  Shared& queue = *queue_;
  std::unique_lock lock(queue.mutex);
  queue.failed = false;
  const bool first = queue.empty();
  const std::size_t held = queue.waiting.size() - queue.at;
  // Nothing is put before the note of what was dropped.
  const bool fits =
      queue.dropped == 0 && text.size() <= queue.options.most - std::min(held, queue.options.most);
  if (fits) {
    queue.append(text);
  } else {
    ++queue.dropped;
  }
  int to_tell = first && !queue.options.may_block ? queue.write_here() : 0;
  if (!queue.has_thread && !queue.empty() && !queue.failed) {
    auto thread = start_thread(queue.options.thread, [shared = queue_] { shared->run(); });
    queue.has_thread = thread.ok();
    if (thread.ok()) {
      thread->detach();
    } else {
      to_tell = queue.write_here();
    }
  }
  queue.changed.notify_all();
  lock.unlock();
  if (to_tell != 0 && queue.options.on_error) queue.options.on_error(to_tell);
  return fits;
}

std::size_t QueuedWriter::queued() const {
  const std::lock_guard lock(queue_->mutex);
  return queue_->waiting.size() - queue_->at;
}

std::size_t QueuedWriter::finish(Duration patience, Duration limit) {
  Shared& queue = *queue_;
  std::unique_lock lock(queue.mutex);
  queue.failed = false;
  queue.changed.notify_all();
  const TimePoint end = deadline_after(steady_clock(), limit);
  std::uint64_t seen = 0;
  do {
    if (!queue.has_thread) queue.write_here();
    seen = queue.written;
    queue.changed.wait_for(lock, patience,
                           [&] { return queue.empty() || queue.failed || queue.written != seen; });
  } while (!queue.empty() && !queue.failed && queue.written != seen && steady_clock().now() < end);
  const std::string_view left = std::string_view(queue.waiting).substr(queue.at);
  return queue.dropped + static_cast<std::size_t>(std::ranges::count(left, '\n'));
}

}  // namespace muster
