#include "core/transport/engine/watcher.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/base/log/log.h"
#include "core/base/threads/thread_start.h"
#include "core/tunables/tunables.h"

namespace muster::transport {
Status Watcher::start(int rank) {
  auto thread = start_thread("the thread that watches the links", [this, rank] { run(rank); });
  if (!thread.ok()) return thread.status();
  thread_ = std::move(*thread);
  return {};
}

void Watcher::stop() {
  if (!thread_.joinable()) return;
  if (mark_.forked()) {
    thread_.detach();
    return;
  }
  stop_.store(true);
  signal_.kick();
  thread_.join();
}

void Watcher::run(int rank) {
  pthread_setname_np(pthread_self(), "muster-watcher");
  set_log_rank(rank);
  TimePoint wake = loop_.watch_pass();
  std::uint64_t polls = loop_.polls();
  while (!stop_.load()) {
    const TimePoint now = steady_clock().now();
    // While user threads poll, input does not wake the watcher; it only checks whether they still
    // poll.
    if (!signal_.armed()) wake = std::min(wake, now + tunables().progress_tick);
    signal_.sleep(now, wake);
    if (stop_.load()) return;
    // A user thread polls, or has polled since the last check, and handles the input.
    const std::uint64_t polls_now = loop_.polls();
    const bool polled = loop_.pollers_active() || (!signal_.armed() && polls_now != polls);
    polls = polls_now;
    wake = loop_.watch_pass();
    polls = loop_.polls();
    if (!polled) loop_.arm_watcher();
  }
}

}  // namespace muster::transport
