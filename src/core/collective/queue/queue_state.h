/// The drive lock, the non-empty flag and the call counter of a queue in one word, so that a call
/// that finds the queue idle takes the lock and its number in one atomic operation.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/base/threads/biased_lock.h"
#include "core/wait/spin_wait.h"

namespace muster::collective {

/// Thread-safe. Every access is sequentially consistent: a thread that fails to take the lock
/// relies on the holder to see what it stored before. As long as only one thread makes calls, it
/// holds the lock by being inside the biased lock.
class QueueState {
 public:
  /// The drive lock, for `std::unique_lock` and the like. Held for one pass or for a bounded part
  /// of one call, and usually only tried.
  bool try_lock() {
    biased_lock_.revoke_unless_owner();
    if (biased_.load(std::memory_order_relaxed)) return false;  // this thread is inside
    return (word_.load() & kDriven) == 0 && (word_.fetch_or(kDriven) & kDriven) == 0;
  }
  void lock() {
    yield_until([this] { return try_lock(); });
  }
  void unlock() {
    if (biased_.load(std::memory_order_relaxed)) {
      biased_.store(false, std::memory_order_relaxed);
      biased_lock_.leave();
    } else {
      word_.fetch_and(~kDriven);
    }
  }

  /// If no thread drives and nothing is queued: takes the lock and returns the number of the next
  /// call. Otherwise returns 0.
  std::uint64_t try_lock_as_next() {
    if (biased_.load(std::memory_order_relaxed)) return 0;  // a thread is inside, perhaps this one
    if (biased_lock_.enter()) {
      const std::uint64_t seen = word_.load(std::memory_order_relaxed);
      if (seen <= kNumbers) [[likely]] {
        word_.store(seen + 1, std::memory_order_relaxed);
        biased_.store(true, std::memory_order_relaxed);
        return seen + 1;
      }
      biased_lock_.leave();
      return 0;
    }
    biased_lock_.revoke();
    std::uint64_t seen = word_.load();
    if (seen > kNumbers || !word_.compare_exchange_strong(seen, (seen + 1) | kDriven)) return 0;
    return seen + 1;
  }

  /// Call before taking the queue's lock for one of the next two methods: a thread that waits for
  /// the holder of the drive lock must hold no lock that the holder may need.
  void prepare() { biased_lock_.revoke_unless_owner(); }
  /// Marks the queue non-empty and returns the number of the call being queued. Under the queue's
  /// lock, so that numbers follow queue order.
  std::uint64_t queue_next() {
    std::uint64_t seen = word_.load();
    while (!word_.compare_exchange_weak(seen, (seen + 1) | kQueued)) {
    }
    return (seen & kNumbers) + 1;
  }
  /// Under the queue's lock.
  void set_queued(bool any) { any ? word_.fetch_or(kQueued) : word_.fetch_and(~kQueued); }
  bool queued() const { return (word_.load() & kQueued) != 0; }
  /// Number of the latest call.
  std::uint64_t number() const { return word_.load() & kNumbers; }

 private:
  static constexpr std::uint64_t kDriven = std::uint64_t{1} << 63;
  static constexpr std::uint64_t kQueued = std::uint64_t{1} << 62;
  static constexpr std::uint64_t kNumbers = kQueued - 1;

  std::atomic<std::uint64_t> word_{0};
  BiasedLock biased_lock_;
  std::atomic<bool> biased_{false};  // the lock is held by being inside
};

}  // namespace muster::collective
