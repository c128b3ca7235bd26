/// The calls in a communicator's queue, and their numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>

#include "core/collective/queue/queue_state.h"
#include "muster/clock.h"

namespace muster::collective {

class Operation;

/// Thread-safe. An intrusive list, so that queueing needs no memory.
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
  mutable std::mutex lock_;
  Operation* first_ = nullptr;
  Operation* last_ = nullptr;
};

}  // namespace muster::collective
