// SPDX-License-Identifier: BSD-3-Clause
/// Bytes that a thread of their own writes, so that no caller waits for a disk that hangs or a
/// reader that stands still. Used by the log, the events of a job, and the workers' output.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <string_view>

#include "core/base/descriptor.h"
#include "muster/clock.h"

namespace muster {

struct QueueOptions {
  std::string thread;  ///< what messages call the thread: "the thread that writes events"
  Descriptor own{};    ///< the descriptor, if it belongs to the writer
  int fd = -1;         ///< the descriptor, if it belongs to others
  /// As ::write on that descriptor, which is the default.
  std::function<ssize_t(std::string_view)> write{};
  /// False: `write` never blocks. `put` calls it while nothing waits.
  bool may_block = true;
  /// Bytes that an error leaves unwritten are tried again with the next ones; otherwise they are
  /// dropped.
  bool keeps_refused = false;
  /// The most bytes that wait. A piece that does not fit is dropped; needs `dropped_note`.
  std::size_t most = std::numeric_limits<std::size_t>::max();
  /// The line to write in place of `count` pieces that were dropped.
  std::function<std::string(std::size_t count)> dropped_note{};
  /// Called without a lock for an error that is not the last one again. May call `log`.
  std::function<void(int error)> on_error{};
  /// Called on the writer's thread, without a lock, once some of what waited is gone.
  std::function<void()> on_written{};
};

/// Writes whole lines in the order in which they were put, several at once where they fit in
/// PIPE_BUF bytes: others may append to the same file or pipe. Thread-safe.
///
/// The thread starts with the first bytes that have to wait for it. If none can be started, `put`
/// writes by itself. The thread shares the queue and closes the descriptor, so neither the owner's
/// end nor a descriptor whose close() hangs is waited for.
class QueuedWriter {
 public:
  explicit QueuedWriter(QueueOptions options);
  /// Waits for nothing. The thread writes the rest if the process lives for long enough.
  ~QueuedWriter();
  QueuedWriter(const QueuedWriter&) = delete;
  QueuedWriter& operator=(const QueuedWriter&) = delete;

  /// Never waits. False if there was no room for `text`, which is dropped whole.
  bool put(std::string_view text);
  /// Bytes that are not written yet.
  std::size_t queued() const;
  /// Waits until all is written or refused, but at most `patience` for the next bytes to be taken,
  /// and `limit` in all. Returns the number of lines that were not written.
  std::size_t finish(Duration patience, Duration limit);

 private:
  struct Shared;
  std::shared_ptr<Shared> queue_;  // shared with the thread, which a hung disk may keep
};

}  // namespace muster
