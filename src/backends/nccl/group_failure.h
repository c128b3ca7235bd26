/// Why a group's backend can no longer be used.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "muster/status.h"

namespace muster::nccl {

/// The first failure stays. Thread-safe; shared by a backend and its Works.
class GroupFailure {
 public:
  /// Returns whether it is the first.
  bool set(Status why) {
    const std::lock_guard lock(mutex_);
    if (!why_.ok()) return false;
    why_ = std::move(why);
    failed_.store(true, std::memory_order_release);
    return true;
  }
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Status why() const {
    const std::lock_guard lock(mutex_);
    return why_;
  }
  void show() { shown_ = true; }
  bool was_shown() const { return shown_; }

 private:
  mutable std::mutex mutex_;
  Status why_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> shown_{false};
};

}  // namespace muster::nccl
