/// The calls that stand in a communicator's queue, and their numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>

#include "muster/base/clock.h"
#include "muster/collective/queue_state.h"

namespace muster::collective {

class Operation;

/// Thread-safe. A list, so that a call takes its place without memory.
class OperationList {
 public:
  /// Who drives, and how many calls there have been: this one word numbers all calls of a group.
  QueueState& state() { return state_; }
  const QueueState& state() const { return state_; }

  /// At the end, with the next number, which it returns: once it stands there, another thread may
  /// end it.
  std::uint64_t push_back(Operation& operation, bool refused) noexcept;
  /// A call that has its number, before those that came later. Under the drive lock.
  void push_front(Operation& operation) noexcept;
  void remove(Operation& operation) noexcept;
  Operation* front() const;
  /// The first ones; how many they are.
  std::size_t first(std::span<Operation*> window) const;
  /// The earliest of all.
  TimePoint next_deadline() const;
  /// The one whose deadline was first past; null where none is.
  const Operation* find_late(TimePoint now) const;

 private:
  QueueState state_;
  mutable std::mutex lock_;
  Operation* first_ = nullptr;
  Operation* last_ = nullptr;
};

}  // namespace muster::collective
