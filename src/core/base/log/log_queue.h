// SPDX-License-Identifier: BSD-3-Clause
/// The log's lines for another logger of this process (Python's `logging`), which takes them on a
/// thread of its own. A thread that logs waits for no other, and takes no lock of the other
/// logger's: at most 10,000 lines of 8 MiB wait in a queue, and others are counted.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/base/log/log.h"

namespace muster {

struct LogRecord {
  LogLevel level = LogLevel::info;
  int rank = -1;    ///< -1: of no rank
  double time = 0;  ///< seconds since 1970
  std::string message;
};

/// From now on lines wait in a queue, whose number it returns, and go nowhere else; that of before
/// has ended. A forked child's lines go where they went before.
int begin_log_queue();
/// Lines go where they went before; those that wait can still be taken.
void end_log_queue();
/// Waits until there are lines in the queue of this number. None: it has ended. For one thread.
std::vector<LogRecord> take_log_records(int queue);

namespace log_queue {
/// Under the lock of the lines. False: there is no queue.
bool put(LogLevel level, int rank, std::string_view message);
/// In a forked child, under the lock of the lines.
void leave_to_parent();
}  // namespace log_queue

}  // namespace muster
