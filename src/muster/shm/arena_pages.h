/// The memory file of an arena and this process's mapping of it: pages get memory, give it back,
/// and become this process's alone for a while.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "muster/base/descriptor.h"
#include "muster/base/fork_guard.h"
#include "muster/base/status.h"
#include "muster/shm/arena_heap.h"
#include "muster/shm/page_ranges.h"
#include "muster/shm/shared_mapping.h"

namespace muster::shm {

/// What says "under the lock" is called under the arena's lock.
class ArenaPages {
 public:
  using Range = ArenaHeap::Range;

  /// A file for up to `limit` bytes, of its whole size at once: no mapping of a peer ever ends
  /// before an offset that is handed out.
  static Result<std::unique_ptr<ArenaPages>> make(std::size_t limit);
  ArenaPages(Descriptor file, Descriptor for_children, std::shared_ptr<SharedMapping> mapping)
      : file_(std::move(file)),
        for_children_(std::move(for_children)),
        mapping_(std::move(mapping)) {}

  std::size_t bytes() const { return mapping_->bytes(); }
  std::byte* at(std::uint64_t offset) const { return mapping_->memory() + offset; }
  /// Where memory stands in the mapping, if it lies in it.
  std::optional<std::uint64_t> position_of(const std::byte* memory, std::size_t bytes) const;
  int descriptor() const { return file_.get(); }
  /// A descriptor of the same file that can only read; none if /proc is not there.
  Descriptor open_read_only() const;

  /// Makes the system give memory for all pages of a range, now: later it could only end the
  /// process.
  bool warm(const Range& range);
  void punch(const std::vector<Range>& ranges);

  /// The parts of a range that are shared with peers, which are to be isolated: they count as
  /// isolated from now on. Under the lock.
  std::vector<Range> begin_isolation(const Range& range);
  /// Breaks the sharing of such a part, for as long as its block is in use. No store of this
  /// process is lost meanwhile: one that comes before its page is copied is copied with it. False
  /// if no memory is left for the copy; `cancel_isolation` must follow.
  bool isolate(const Range& range);
  /// Under the lock.
  void cancel_isolation(const Range& range);
  /// Shares the pages of a block again that has been freed. False: the block is lost. Under the
  /// lock.
  bool rejoin(const Range& block);
  /// Without the lock.
  bool has_isolated() const { return isolated_now_.load(std::memory_order_acquire) != nullptr; }
  /// Under the lock.
  bool is_isolated(const Range& range) const { return isolated_.touches(range); }

  /// In a child, right after the fork, where only this thread runs: gives it a copy of its own of
  /// what lies below `end`. Takes no lock. If that fails the child goes on sharing pages. What was
  /// its parent's alone is a copy already.
  void keep_own_copy(std::uint64_t end);

 private:
  void publish_isolated();
  bool map_pages(const Range& range, int how);

  GuardedDescriptor file_;
  Descriptor for_children_;  // of the same file; closed once a child has copied its memory from it
  std::shared_ptr<SharedMapping> mapping_;
  PageRanges isolated_;                                   // of blocks in use
  std::atomic<const PageRanges*> isolated_now_{nullptr};  // the same for a forked child; null: none
};

}  // namespace muster::shm
