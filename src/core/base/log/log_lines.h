// SPDX-License-Identifier: BSD-3-Clause
/// Writes finished lines to standard error without ever waiting for its reader. Private to
/// `log.cc`.
///
/// A line is written at once if there is room, so that the last words of a process that is killed
/// are not lost. If standard error is a full pipe or terminal, the line waits in a bounded queue
/// for a thread (`queued_writer.h`). So a line may be logged under any lock. Only a regular file on
/// a disk that hangs is waited for, unless the process has asked for the thread.
#pragma once

#include <cstddef>
#include <string_view>

namespace muster::log_lines {

/// At most so much waits; the lines that come after that are counted, and their number is written
/// in their place.
inline constexpr std::size_t kMostWaiting = std::size_t{1} << 20;  // limit: memory

/// Held while a line is made and handed over; its holder must not fork. A forked child begins with
/// an empty queue.
class Lock {
 public:
  Lock();
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};

/// A whole line with its end. Under the lock. Never blocks.
void put(std::string_view line);

/// Under the lock. From now on the thread writes all lines of this process, to files too.
void leave_to_thread();

}  // namespace muster::log_lines
