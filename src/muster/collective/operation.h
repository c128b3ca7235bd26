/// A collective that stands in a communicator's queue.
#pragma once

#include <cstdint>
#include <memory>

#include "muster/base/task.h"
#include "muster/collective/communicator.h"
#include "muster/collective/completion.h"
#include "muster/collective/driver.h"
#include "muster/collective/link_group.h"

namespace muster::collective {

class CollectiveQueue;

/// From the first to behind the last byte that a call reads, or writes; empty where there is none.
struct MemoryRange {
  std::uintptr_t low = 0, high = 0;
  bool meets(const MemoryRange& other) const { return low < other.high && other.low < high; }
};

/// What must be known of a call for others to be under way beside it.
struct CallMemory {
  MemoryRange reads, writes;
  bool small = false;  ///< it may be
  bool is_apart(const CallMemory& other) const {
    return !writes.meets(other.writes) && !writes.meets(other.reads) && !reads.meets(other.writes);
  }
};
CallMemory memory_of(const Args& args);

/// Shared where it was started, on the stack of its thread where it blocks.
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
  std::shared_ptr<Driver> driver_;  // of a started call, until it is over
  std::shared_ptr<void> owner_;     // of its memory, so long too
  Operation* next_ = nullptr;       // in the queue
  std::shared_ptr<Operation> self_;
  Args owned_;
  const Args* args_ = nullptr;
  transport::Fingerprint call_;
  const TimePoint deadline_;
  TimePoint made_;
  int reminders_ = 0;
  bool queued_ = false;
  bool begun_ = false;
  bool beside_ = false;
  bool remembered_ = false;     // the control knows of it
  CallMemory memory_;           // over links
  LinkGroup* links_ = nullptr;  // once it has begun there
  Task<Status> task_;
};

}  // namespace muster::collective
