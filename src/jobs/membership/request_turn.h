/// Lets one request through at a time. Like std::timed_mutex, whose wait for a point in time the
/// ThreadSanitizer of g++ 12 does not see. Holds no lock while the request runs; thread-safe.
#pragma once

#include <condition_variable>
#include <mutex>

#include "muster/clock.h"

namespace muster::membership {

class RequestTurn {
 public:
  void lock() {
    std::unique_lock guard(mutex_);
    free_.wait(guard, [this] { return !taken_; });
    taken_ = true;
  }
  /// False if the turn did not come before `deadline`.
  bool try_lock_until(TimePoint deadline) {
    std::unique_lock guard(mutex_);
    if (!free_.wait_until(guard, deadline, [this] { return !taken_; })) return false;
    taken_ = true;
    return true;
  }
  void unlock() {
    const std::lock_guard guard(mutex_);
    taken_ = false;
    free_.notify_one();
  }

 private:
  std::mutex mutex_;  // guards what follows; no other lock is taken under it
  std::condition_variable free_;
  bool taken_ = false;
};

}  // namespace muster::membership
