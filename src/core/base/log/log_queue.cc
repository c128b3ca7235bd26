// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/log/log_queue.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "core/base/log/log_lines.h"

namespace muster {
namespace {

constexpr std::size_t kMostRecords = 10'000;              // limit: memory
constexpr std::size_t kMostBytes = std::size_t{8} << 20;  // limit: memory

struct RecordQueue {
  std::mutex mutex;  // guards all below; nothing else is taken under it
  std::condition_variable changed;
  std::vector<LogRecord> waiting;
  std::size_t bytes = 0;  // of the messages that wait
  std::size_t dropped = 0;
  bool ended = false;
};

// All that this process has had, and the one that lines go to: under the lock of the lines. Never
// destroyed: a thread may wait in one while the process ends, and a forked child's copy may be
// locked.
std::vector<RecordQueue*>& queues() {
  static auto* const all = new std::vector<RecordQueue*>;
  return *all;
}
RecordQueue* filled = nullptr;

void end_filled() {
  RecordQueue* const queue = std::exchange(filled, nullptr);
  if (queue == nullptr) return;
  {
    const std::lock_guard held(queue->mutex);
    queue->ended = true;
  }
  queue->changed.notify_all();
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

namespace log_queue {

bool put(LogLevel level, int rank, std::string_view message) {
  if (filled == nullptr) return false;
  {
    const std::lock_guard held(filled->mutex);
    if (filled->waiting.size() >= kMostRecords || filled->bytes + message.size() > kMostBytes) {
      ++filled->dropped;
      return true;
    }
    filled->bytes += message.size();
    filled->waiting.push_back({level, rank, seconds_since_1970(), std::string(message)});
  }
  filled->changed.notify_one();
  return true;
}

void leave_to_parent() {
  filled = nullptr;
  for (RecordQueue*& queue : queues()) queue = nullptr;
}

}  // namespace log_queue

int begin_log_queue() {
  const log_lines::Lock lock;
  end_filled();
  filled = queues().emplace_back(new RecordQueue);
  return static_cast<int>(queues().size()) - 1;
}

void end_log_queue() {
  const log_lines::Lock lock;
  end_filled();
}

std::vector<LogRecord> take_log_records(int number) {
  RecordQueue* queue = nullptr;
  {
    const log_lines::Lock lock;
    const auto at = static_cast<std::size_t>(number);
    queue = at < queues().size() ? queues()[at] : nullptr;
  }
  if (queue == nullptr) return {};
  std::unique_lock held(queue->mutex);
  queue->changed.wait(held, [&] { return !queue->waiting.empty() || queue->ended; });
  std::vector<LogRecord> taken = std::exchange(queue->waiting, {});
  queue->bytes = 0;
  if (const std::size_t dropped = std::exchange(queue->dropped, 0); dropped > 0)
    taken.push_back({LogLevel::warning, -1, seconds_since_1970(),
                     std::to_string(dropped) + " lines of the log were dropped: the logger that "
                                               "takes them was too slow"});
  return taken;
}

}  // namespace muster
