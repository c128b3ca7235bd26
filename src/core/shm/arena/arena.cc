// SPDX-License-Identifier: BSD-3-Clause
#include "core/shm/arena/arena.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/base/log/log.h"
#include "core/base/process/fork_guard.h"
#include "core/base/process/limits.h"
#include "core/shm/arena/arena_heap.h"
#include "core/shm/arena/arena_pages.h"
#include "core/shm/arena/quarantine.h"
#include "core/tunables/tunables_fixed.h"
#include "muster/clock.h"

namespace muster::shm {
namespace {

/// The pages that [range) covers. The first and the last page of its block count as covered: the
/// rest of such a page is too small to be granted separately.
ArenaHeap::Range whole_pages(const ArenaHeap::Range& range, const ArenaHeap::Range& block) {
  constexpr std::size_t kPage = ArenaHeap::kPage;
  const std::uint64_t end = range.offset + range.bytes, block_end = block.offset + block.bytes;
  const std::uint64_t from = range.offset < block.offset + kPage
                                 ? block.offset
                                 : (range.offset + kPage - 1) / kPage * kPage;
  const std::uint64_t to = end + kPage > block_end ? block_end : end / kPage * kPage;
  return {from, block.bytes > 0 && to > from ? to - from : 0};
}

class ProcessArena final : public Arena {
 public:
  static Result<std::unique_ptr<ProcessArena>> make(ProcessArena* inherited);
  ProcessArena(std::unique_ptr<ArenaPages> pages, std::size_t limit, ProcessArena* inherited)
      : pages_(std::move(pages)),
        inherited_(inherited),
        heap_(pages_->bytes(), std::min(pages_->bytes(), limit), ArenaLimits().keep) {}

  Result<std::byte*> allocate(std::size_t bytes) override;
  void free(std::byte* memory) override;
  void quarantine(const std::byte* memory, std::size_t bytes, std::function<bool()> held) override;
  void trim() override;
  void set_limits(const ArenaLimits& limits) override;
  void keep_more(std::ptrdiff_t bytes) override;
  std::optional<std::uint64_t> offset_of(const std::byte* memory, std::size_t bytes) const override;
  /// The same, also for memory that is currently isolated from peers.
  std::optional<std::uint64_t> position_of(const std::byte* memory, std::size_t bytes) const {
    return pages_->position_of(memory, bytes);
  }
  std::byte* at(std::uint64_t offset, std::size_t bytes) const override {
    return offset <= pages_->bytes() && bytes <= pages_->bytes() - offset ? pages_->at(offset)
                                                                          : nullptr;
  }
  void make_read_only() override;
  bool is_read_only() const override { return read_only_.load(std::memory_order_acquire); }
  int descriptor() const override {
    return is_read_only() && readable_ ? readable_.get() : pages_->descriptor();
  }
  std::size_t bytes_in_use() const override { return stats().bytes_in_use; }
  ArenaStats stats() const override {
    const std::lock_guard hold(lock_);
    const std::size_t out_of_use = quarantine_.bytes();
    return {heap_.bytes_in_use() - out_of_use,
            heap_.bytes_kept(),
            out_of_use,
            heap_.limit(),
            returned_,
            allocations_};
  }
  bool forked() const { return mark_.forked(); }
  ProcessArena* inherited() const { return inherited_; }
  void keep_own_copy() { pages_->keep_own_copy(heap_.end()); }

 private:
  std::optional<std::byte*> try_allocate(std::size_t bytes, bool& refused);
  void return_holes(const std::vector<ArenaHeap::Range>& holes);
  bool sweep_quarantine(bool at_once);
  std::size_t keep_limit() const {
    return keep_ + std::min(extra_keep_, std::numeric_limits<std::size_t>::max() - keep_);
  }

  const std::unique_ptr<ArenaPages> pages_;
  GuardedDescriptor readable_;
  std::atomic<bool> read_only_{false};
  ProcessArena* inherited_;  // arena of the process that this one was forked from
  ProcessMark mark_;
  // Guards all below, the set of isolated pages, and the making of `readable_`. Pages are
  // committed, punched and copied without it, which may take milliseconds: the heap gives their
  // ranges to no other thread meanwhile.
  mutable std::mutex lock_;
  ArenaHeap heap_;
  Quarantine quarantine_;
  std::atomic<bool> quarantines_{false};  // not empty; a hint for readers without the lock
  TimePoint next_sweep_{};
  std::size_t keep_ = ArenaLimits().keep, extra_keep_ = 0;
  std::uint64_t returned_ = 0;
  std::uint64_t allocations_ = 0;
};

// Arenas are never destroyed, because tensors may outlive every group. A forked child's is put
// before its parent's, so each acquire sees a whole chain.
std::atomic<ProcessArena*> g_arena{nullptr};

void keep_own_copy_in_child() {
  if (ProcessArena* const arena = g_arena.load(std::memory_order_acquire)) arena->keep_own_copy();
}

Result<std::unique_ptr<ProcessArena>> ProcessArena::make(ProcessArena* inherited) {
  static const int armed = pthread_atfork(nullptr, nullptr, keep_own_copy_in_child);
  static_cast<void>(armed);
  const std::size_t limit = host_memory().limit;
  auto pages = ArenaPages::make(limit);
  if (!pages) return pages.status();
  return std::make_unique<ProcessArena>(std::move(*pages), limit, inherited);
}

Result<std::byte*> ProcessArena::allocate(std::size_t bytes) {
  if (forked())
    return Status(Code::aborted,
                  "a forked child cannot allocate memory from its parent's shared arena");
  sweep_quarantine(false);
  bool refused = false;
  if (const auto memory = try_allocate(bytes, refused)) return *memory;
  const bool freed = sweep_quarantine(true);
  ArenaStats now = stats();
  // Kept memory may be in the way: too fragmented, counted against the limit, or needed by the
  // system.
  if ((freed || now.bytes_kept > 0) &&
      bytes <= now.most - std::min(now.most, now.bytes_in_use + now.bytes_quarantined)) {
    trim();
    refused = false;
    if (const auto memory = try_allocate(bytes, refused)) return *memory;
    now = stats();
  }
  return Status(
      Code::exhausted,
      "the shared arena has no room for " + std::to_string(bytes) + " bytes: " +
          std::to_string(now.bytes_in_use) + " of " + std::to_string(now.most) + " are in use" +
          (now.bytes_quarantined > 0 ? ", " + std::to_string(now.bytes_quarantined) +
                                           " more are quarantined, because a stopped peer of a "
                                           "failed call may still write to them"
                                     : "") +
          (refused ? ", and the system has no more memory" : ""));
}

std::optional<std::byte*> ProcessArena::try_allocate(std::size_t bytes, bool& refused) {
  std::optional<ArenaHeap::Allocation> taken;
  {
    const std::lock_guard hold(lock_);
    taken = heap_.allocate(bytes);
    if (!taken) return std::nullopt;
    ++allocations_;
  }
  if (taken->cold.bytes == 0) return pages_->at(taken->offset);
  // Without the lock: it may take milliseconds.
  const bool warmed = pages_->warm(taken->cold);
  if (!warmed) pages_->punch({taken->cold});  // part of it may be committed
  const std::lock_guard hold(lock_);
  if (warmed) {
    heap_.warmed(*taken);
    return pages_->at(taken->offset);
  }
  heap_.refused(*taken);
  --allocations_;
  refused = true;
  return std::nullopt;
}

void ProcessArena::free(std::byte* memory) {
  // A child must not free inherited memory: the parent may still use it, and the child has only a
  // copy of the bookkeeping.
  if (memory == nullptr || forked()) return;
  const auto offset = position_of(memory, 0);
  for (const ProcessArena* parent = inherited_; !offset && parent != nullptr;
       parent = parent->inherited_) {
    if (parent->position_of(memory, 0)) return;
  }
  std::vector<ArenaHeap::Range> holes;
  bool known = false;
  {
    const std::lock_guard hold(lock_);
    const std::size_t bytes = offset ? heap_.bytes_at(*offset) : 0;
    known = bytes > 0;
    if (known && pages_->rejoin({*offset, bytes}) && !quarantine_.keep({*offset, bytes}))
      heap_.free(*offset, holes);
  }
  if (!known) {
    log(LogLevel::error,
        "memory was freed to the shared arena that was not allocated from it; ignored");
    return;
  }
  return_holes(holes);
  sweep_quarantine(false);
}

void ProcessArena::return_holes(const std::vector<ArenaHeap::Range>& holes) {
  if (holes.empty()) return;
  pages_->punch(holes);
  const std::lock_guard hold(lock_);
  for (const auto& hole : holes) {
    heap_.punched(hole);
    returned_ += hole.bytes;
  }
}

void ProcessArena::quarantine(const std::byte* memory, std::size_t bytes,
                              std::function<bool()> held) {
  const auto offset = position_of(memory, bytes);
  if (forked() || !offset || bytes == 0) return;
  std::vector<ArenaHeap::Range> shared_parts;
  {
    const std::lock_guard hold(lock_);
    quarantine_.add({*offset, bytes}, std::move(held));
    quarantines_.store(true, std::memory_order_relaxed);
    const ArenaHeap::Range block = heap_.pages_around(*offset);
    shared_parts = pages_->begin_isolation(whole_pages({*offset, bytes}, block));
  }
  for (const auto& range : shared_parts) {
    if (pages_->isolate(range)) continue;
    log(LogLevel::warning, "a stopped peer of a failed call may still write to " +
                               std::to_string(range.bytes) +
                               " bytes of that call's memory when it continues, because no memory "
                               "is left to copy them; create new tensors instead of reusing the "
                               "call's");
    const std::lock_guard hold(lock_);
    pages_->cancel_isolation(range);
  }
}

/// Frees quarantined blocks that no peer holds any more. Checking takes system calls, so it is
/// rate-limited unless `at_once`. Returns whether a block was freed.
bool ProcessArena::sweep_quarantine(bool at_once) {
  if (!quarantines_.load(std::memory_order_relaxed)) return false;
  Quarantine::Over over;  // predicates are destroyed without the lock: they may unmap a region
  std::vector<ArenaHeap::Range> holes;
  {
    const std::lock_guard hold(lock_);
    const TimePoint now = steady_clock().now();
    if (!at_once && now < next_sweep_) return false;
    next_sweep_ = now + Duration(fixed::kSweepNanoseconds);
    over = quarantine_.sweep();
    for (const std::uint64_t block : over.blocks) heap_.free(block, holes);
    quarantines_.store(!quarantine_.empty(), std::memory_order_relaxed);
  }
  return_holes(holes);
  return !over.blocks.empty();
}

void ProcessArena::trim() {
  if (forked()) return;
  sweep_quarantine(true);
  std::vector<ArenaHeap::Range> holes;
  {
    const std::lock_guard hold(lock_);
    heap_.trim(holes);
  }
  return_holes(holes);
}

void ProcessArena::set_limits(const ArenaLimits& limits) {
  const std::size_t most = limits.most != 0 ? limits.most : host_memory().limit;
  std::size_t kept = 0;
  {
    const std::lock_guard hold(lock_);
    keep_ = limits.keep;
    kept = keep_limit();
    heap_.set_limits(most, kept);
  }
  const ArenaStats now = stats();
  if (now.bytes_kept > kept || now.bytes_in_use + now.bytes_quarantined + now.bytes_kept > most)
    trim();
}

void ProcessArena::keep_more(std::ptrdiff_t bytes) {
  const std::lock_guard hold(lock_);
  extra_keep_ += static_cast<std::size_t>(bytes);
  heap_.set_limits(heap_.limit(), keep_limit());
}

void ProcessArena::make_read_only() {
  const std::lock_guard hold(lock_);
  if (!readable_) {
    readable_ = GuardedDescriptor(pages_->open_read_only());
    if (!readable_)
      log(LogLevel::warning,
          "the shared arena cannot be opened read-only, because /proc is not mounted; peers are "
          "trusted not to write");
  }
  read_only_.store(true, std::memory_order_release);
}

std::optional<std::uint64_t> ProcessArena::offset_of(const std::byte* memory,
                                                     std::size_t bytes) const {
  const auto offset = position_of(memory, bytes);
  if (!offset || forked() || !pages_->has_isolated()) return offset;
  const std::lock_guard hold(lock_);
  return pages_->is_isolated({*offset, bytes}) ? std::nullopt : offset;
}

}  // namespace

Arena* Arena::holder_of(const std::byte* memory) {
  for (ProcessArena* each = g_arena.load(std::memory_order_acquire); each != nullptr;
       each = each->inherited()) {
    if (each->position_of(memory, 1)) return each;
  }
  return nullptr;
}

Arena* Arena::if_made() {
  ProcessArena* const arena = g_arena.load(std::memory_order_acquire);
  return arena != nullptr && !arena->forked() ? arena : nullptr;
}

Result<Arena*> Arena::of_process() {
  if (Arena* const arena = if_made()) return arena;
  // No lock: if another thread held it during a fork, it would stay locked in the child.
  ProcessArena* there = g_arena.load(std::memory_order_acquire);
  auto made = ProcessArena::make(there);
  if (!made) return made.status();
  if (g_arena.compare_exchange_strong(there, made->get(), std::memory_order_acq_rel))
    return static_cast<Arena*>(made->release());
  return static_cast<Arena*>(there);  // another thread installed its arena first
}

}  // namespace muster::shm
