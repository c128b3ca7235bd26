// SPDX-License-Identifier: BSD-3-Clause
/// One rank's view of a host region. Private to `region_memory.cc` and the shared streams.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "core/base/process/fork_guard.h"
#include "core/shm/arena/segment_heap.h"
#include "core/shm/region_layout.h"

namespace muster::shm {

struct SharedRing {
  RingControl* control;
  std::byte* data;
  std::size_t bytes;  ///< a power of two
};

class RegionView final : public HostRegion {
 public:
  RegionView(std::byte* memory, const RegionShape& shape, int local_rank,
             std::shared_ptr<void> owner, ArenaLookup lookup, ArenaReady ready,
             ProcessOf processes);

  std::span<const int> ranks() const override { return ranks_; }
  int local_rank() const override { return local_rank_; }
  Mailbox& mailbox(int local_rank) override {
    return at_as<Mailbox>(layout_.mailboxes)[local_rank];
  }
  bool holds_bytes_from(int local_rank) override {
    const RingControl& control = *ring(local_rank, local_rank_).control;
    return control.tail.load(std::memory_order_acquire) !=
           control.head.load(std::memory_order_relaxed);
  }
  Result<std::uint64_t> claim(std::size_t bytes) override;
  void release(std::uint64_t offset) override;
  std::byte* at(std::uint64_t offset) override { return memory_ + offset; }
  std::shared_ptr<void> memory() override { return owner_; }
  std::byte* arena_at(int local_rank, std::uint64_t offset, std::size_t bytes) override;
  bool arena_ready(int local_rank) override { return !ready_ || ready_(local_rank); }
  std::shared_ptr<ProcessEnd> process_of(int local_rank) override {
    return processes_ ? processes_(local_rank) : nullptr;
  }
  bool can_read(int local_rank) override;
  bool keeps_memory(int local_rank) override;
  bool read(int local_rank, std::uint64_t address, MutableBytes to) override;

  ReadProbe& read_probe(int local_rank) {
    return at_as<ReadProbe>(layout_.read_probes)[local_rank];
  }
  Doorbell& doorbell(int local_rank) { return at_as<Doorbell>(layout_.doorbells)[local_rank]; }
  SharedRing ring(int from, int to);
  const std::shared_ptr<void>& owner() const { return owner_; }

 private:
  enum class ReadAccess : std::uint8_t { unknown, yes, no };

  template <class T>
  T* at_as(std::size_t offset) {
    return reinterpret_cast<T*>(memory_ + offset);
  }

  std::byte* memory_;
  RegionLayout layout_;
  std::vector<int> ranks_;
  int local_rank_;
  std::shared_ptr<void> owner_;
  ArenaLookup lookup_;
  ArenaReady ready_;
  ProcessOf processes_;
  SegmentHeap heap_;
  ProcessMark mark_;
  const std::uint64_t word_;  // the word in this rank's read probe
  // By local rank. A cache of what `read` found, in no order with anything else: threads that look
  // at the same time may each try, and come to the same result.
  std::vector<std::atomic<ReadAccess>> read_access_;
};

}  // namespace muster::shm
