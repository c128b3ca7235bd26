/// The engine's lock. Private to `transport/`.
#pragma once

#include <atomic>
#include <mutex>

namespace muster::transport {

/// A mutex whose `try_lock` gives way to threads that wait in `lock`: threads that try in a loop do
/// not starve them.
class PassLock {
 public:
  void lock() {
    if (mutex_.try_lock()) return;
    waiting_.fetch_add(1, std::memory_order_relaxed);
    mutex_.lock();
    waiting_.fetch_sub(1, std::memory_order_relaxed);
  }
  bool try_lock() { return waiting_.load(std::memory_order_relaxed) == 0 && mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
  std::atomic<int> waiting_{0};
};

}  // namespace muster::transport
