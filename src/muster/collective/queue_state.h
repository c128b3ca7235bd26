/// Who drives a queue of calls, whether any stand in it, and how many there have been: one word, so
/// that a call that finds nobody there takes the lock and its number at one stroke.
#pragma once

#include <atomic>
#include <cstdint>

#include "muster/base/biased_lock.h"
#include "muster/wait/spin_wait.h"

namespace muster::collective {

/// Thread-safe. Every access is sequentially consistent: who fails to take the lock counts on its
/// holder to see what it did before. As long as one thread alone makes the calls, it holds the lock
/// by being inside the bias.
class QueueState {
 public:
  /// The drive lock, for `std::unique_lock` and the like: held for one pass, or by a call for a
  /// moment, and mostly only tried.
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

  /// Where nobody drives and nothing is queued: takes the lock, and returns the number of the call
  /// that goes first. Else 0.
  std::uint64_t try_lock_as_next() {
    if (biased_.load(std::memory_order_relaxed))
      return 0;  // somebody is inside, perhaps this thread
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

  /// Before the queue's lock is taken for one of the next two: what waits for a holder of the drive
  /// lock must hold nothing that it may need.
  void prepare() { biased_lock_.revoke_unless_owner(); }
  /// The number of a call that stands in the queue from now on. Under the queue's lock, so that
  /// numbers and places agree.
  std::uint64_t queue_next() {
    std::uint64_t seen = word_.load();
    while (!word_.compare_exchange_weak(seen, (seen + 1) | kQueued)) {
    }
    return (seen & kNumbers) + 1;
  }
  /// Under the queue's lock.
  void set_queued(bool any) { any ? word_.fetch_or(kQueued) : word_.fetch_and(~kQueued); }
  bool queued() const { return (word_.load() & kQueued) != 0; }
  /// Of the latest call.
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
