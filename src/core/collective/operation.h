// SPDX-License-Identifier: BSD-3-Clause
/// The calls in a communicator's queue: one of them, their list, and the word that holds the
/// queue's lock and call counter.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>

#include "core/base/threads/biased_lock.h"
#include "core/base/time/task.h"
#include "core/collective/communicator.h"
#include "core/collective/completion.h"
#include "core/collective/control.h"
#include "core/collective/links/link_group.h"
#include "core/collective/queue/driver.h"
#include "core/wait/spin_wait.h"
#include "muster/clock.h"

namespace muster::collective {

class CollectiveQueue;

/// The range from the first to past the last byte that a call reads, or writes; empty if there is
/// none.
struct MemoryRange {
  std::uintptr_t low = 0, high = 0;
  bool meets(const MemoryRange& other) const { return low < other.high && other.low < high; }
};

/// The properties that decide whether other calls may be pipelined with this one.
struct CallMemory {
  MemoryRange reads, writes;
  bool small = false;  ///< small enough to be pipelined
  bool is_apart(const CallMemory& other) const {
    return !writes.meets(other.writes) && !writes.meets(other.reads) && !reads.meets(other.writes);
  }
};
CallMemory memory_of(const Args& args);

/// A collective in a communicator's queue. A started call is shared; a blocking call lives on its
/// thread's stack.
class Operation final : public Completion {
 public:
  Operation(CollectiveQueue& queue, std::shared_ptr<Driver> driver, TimePoint deadline)
      : queue_(queue), driver_(std::move(driver)), deadline_(deadline) {}
  ~Operation() override;

  bool done() const override;
  Status wait(TimePoint deadline) override;

 private:
  friend class CollectiveQueue;
  friend class OperationList;
  std::shared_ptr<Driver> driver() const;

  // Until the call is queued, its caller's thread alone uses all this. Afterwards `driver_` and
  // `owner_` are under `lock_`, `next_` is under the list's lock, and all else that changes is
  // under the drive lock.
  CollectiveQueue& queue_;
  std::shared_ptr<Driver> driver_;   // for a started call, until it has ended
  std::shared_ptr<void> owner_;      // of its memory; also until it has ended
  Operation* next_ = nullptr;        // in the queue
  std::shared_ptr<Operation> self_;  // keeps a started call until it has ended; null: blocking call
  Args owned_;
  const Args* args_ = nullptr;
  transport::Fingerprint call_;
  const TimePoint deadline_;
  TimePoint created_at_;
  Reminders reminders_;
  bool queued_ = false;
  bool begun_ = false;
  bool unknown_to_driver_ = false;
  bool remembered_ = false;          // recorded in `Control`
  CallMemory memory_;                // used over links
  std::function<Status()> prepare_;  // empty: none
  LinkGroup* links_ = nullptr;       // set once it has begun over links
  Task<Status> task_;
};

/// The drive lock, the non-empty flag and the call counter of a queue in one word, so that a call
/// that finds the queue idle takes the lock and its number in one atomic operation.
///
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

  // While the bias lasts, only its owner changes the word, by plain stores while it is inside;
  // every other thread revokes the bias first.
  std::atomic<std::uint64_t> word_{0};
  BiasedLock biased_lock_;
  // The lock is held by being inside. Written by the owner of the bias only, while it is inside, so
  // any thread that has revoked reads false.
  std::atomic<bool> biased_{false};
};

/// The calls in a communicator's queue, and their numbers. Thread-safe. An intrusive list, so that
/// queueing needs no memory.
class OperationList {
 public:
  /// The drive lock and the number of calls so far: one word numbers all calls of a group.
  QueueState& state() { return state_; }
  const QueueState& state() const { return state_; }

  /// Appends the call and returns its number, the next one. Once appended, another thread may
  /// complete it.
  std::uint64_t push_back(Operation& operation, bool refused) noexcept;
  /// Inserts a call whose number precedes those of all queued calls. Under the drive lock.
  void push_front(Operation& operation) noexcept;
  void remove(Operation& operation) noexcept;
  Operation* front() const;
  /// Copies the first calls into `window` and returns how many there are.
  std::size_t first(std::span<Operation*> window) const;
  /// The earliest deadline of all.
  TimePoint next_deadline() const;
  /// The call with the earliest deadline that has passed; null if there is none.
  const Operation* find_late(TimePoint now) const;

 private:
  QueueState state_;
  // Guards the list. Held for a few steps only; no other lock is taken under it. An entry stays
  // valid until it is removed, which the holder of the drive lock does.
  mutable std::mutex lock_;
  Operation* first_ = nullptr;
  Operation* last_ = nullptr;
};

}  // namespace muster::collective
