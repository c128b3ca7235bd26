// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/operation.h"

#include <algorithm>
#include <utility>

#include "core/collective/call.h"
#include "core/collective/op.h"
#include "core/collective/queue/collective_queue.h"
#include "core/tunables/tunables.h"

namespace muster::collective {
namespace {

template <class T>
MemoryRange range_of(const SliceList<T>& slices, std::size_t& bytes) {
  MemoryRange range;
  for (const auto& slice : slices) {
    if (slice.empty()) continue;
    bytes += slice.size();
    const auto low = reinterpret_cast<std::uintptr_t>(slice.data());
    range.low = range.high == 0 ? low : std::min(range.low, low);
    range.high = std::max(range.high, low + slice.size());
  }
  return range;
}

}  // namespace

CallMemory memory_of(const Args& args) {
  std::size_t bytes = 0;
  CallMemory memory{range_of(args.inputs, bytes), range_of(args.outputs, bytes)};
  memory.small = args.pieces == nullptr && bytes <= tunables().small_call;
  return memory;
}

Operation::~Operation() {
  if (queued_ && !published()) queue_.abandon(*this);
}

std::shared_ptr<Driver> Operation::driver() const {
  const std::lock_guard guard(const_cast<Operation*>(this)->lock_);
  return driver_;
}

bool Operation::done() const {
  if (published()) return true;
  if (const auto driver = this->driver()) {
    driver->fabric()->poll();
    driver->poll_between_compute();
    if (!published() && queue_.group().now() >= deadline_) {
      driver->check_deadlines(queue_.group().now());
      driver->poll_between_compute();
    }
  }
  return published();
}

Status Operation::wait(TimePoint deadline) {
  if (published()) return status();
  const auto driver = this->driver();
  if (driver != nullptr && !driver->drive_until([this] { return published(); }, deadline)) {
    return Status(Code::timed_out, "the wait for " + fingerprint_rules().describe(call_) + " of " +
                                       queue_.group().here() +
                                       " timed out; the call itself continues");
  }
  return status();
}

std::uint64_t OperationList::push_back(Operation& operation, bool refused) noexcept {
  const Args& args = *operation.args_;
  state_.prepare();
  const std::lock_guard guard(lock_);
  operation.queued_ = true;
  (first_ == nullptr ? first_ : last_->next_) = &operation;
  last_ = &operation;
  const std::uint64_t number = state_.queue_next();
  // Still under the lock: a thread that finds the call in the list may begin it at once.
  operation.call_ = refused ? refusal_of(args.op, number) : fingerprint_of(args, number);
  return number;
}

void OperationList::push_front(Operation& operation) noexcept {
  const std::lock_guard guard(lock_);
  operation.queued_ = true;
  operation.next_ = std::exchange(first_, &operation);
  if (last_ == nullptr) last_ = &operation;
  state_.set_queued(true);
}

void OperationList::remove(Operation& operation) noexcept {
  state_.prepare();
  const std::lock_guard guard(lock_);
  Operation* before = nullptr;
  for (Operation* each = first_; each != &operation; each = each->next_) {
    if (each == nullptr) return;
    before = each;
  }
  (before == nullptr ? first_ : before->next_) = operation.next_;
  if (last_ == &operation) last_ = before;
  operation.next_ = nullptr;
  if (first_ == nullptr) state_.set_queued(false);
}

Operation* OperationList::front() const {
  const std::lock_guard guard(lock_);
  return first_;
}

std::size_t OperationList::first(std::span<Operation*> window) const {
  const std::lock_guard guard(lock_);
  std::size_t number = 0;
  for (Operation* each = first_; each != nullptr && number < window.size(); each = each->next_)
    window[number++] = each;
  return number;
}

TimePoint OperationList::next_deadline() const {
  const std::lock_guard guard(lock_);
  TimePoint earliest = TimePoint::max();
  for (const Operation* each = first_; each != nullptr; each = each->next_)
    earliest = std::min(earliest, each->deadline_);
  return earliest;
}

const Operation* OperationList::find_late(TimePoint now) const {
  const std::lock_guard guard(lock_);
  const Operation* late = nullptr;
  for (const Operation* each = first_; each != nullptr; each = each->next_) {
    if (each->deadline_ <= now && (late == nullptr || each->deadline_ < late->deadline_))
      late = each;
  }
  return late;
}

}  // namespace muster::collective
