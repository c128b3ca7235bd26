#include "core/collective/operation.h"

#include <algorithm>

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
  memory.small = bytes <= tunables().small_call;
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

}  // namespace muster::collective
