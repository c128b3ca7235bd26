/// A collective in a communicator's queue.
#pragma once

#include <cstdint>
#include <memory>

#include "core/base/time/task.h"
#include "core/collective/communicator.h"
#include "core/collective/completion.h"
#include "core/collective/links/link_group.h"
#include "core/collective/queue/driver.h"

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

/// A started call is shared; a blocking call lives on its thread's stack.
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

  CollectiveQueue& queue_;
  std::shared_ptr<Driver> driver_;  // for a started call, until it has ended
  std::shared_ptr<void> owner_;     // of its memory; also until it has ended
  Operation* next_ = nullptr;       // in the queue
  std::shared_ptr<Operation> self_;
  Args owned_;
  const Args* args_ = nullptr;
  transport::Fingerprint call_;
  const TimePoint deadline_;
  TimePoint created_at_;
  int reminders_ = 0;
  bool queued_ = false;
  bool begun_ = false;
  bool unknown_to_driver_ = false;
  bool remembered_ = false;     // recorded in `Control`
  CallMemory memory_;           // used over links
  LinkGroup* links_ = nullptr;  // set once it has begun over links
  Task<Status> task_;
};

}  // namespace muster::collective
