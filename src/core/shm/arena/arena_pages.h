// SPDX-License-Identifier: BSD-3-Clause
/// The memory file of an arena and this process's mapping of it. Commits pages, returns them, and
/// isolates them from peers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/process/fork_guard.h"
#include "core/shm/arena/arena_heap.h"
#include "core/shm/shared_mapping.h"
#include "muster/status.h"

namespace muster::shm {

/// Methods marked "Under the lock" require the arena's lock.
class ArenaPages {
 public:
  using Range = ArenaHeap::Range;

  /// Creates a file for up to `limit` bytes at its full size, so that no peer's mapping ends before
  /// an allocated offset.
  static Result<std::unique_ptr<ArenaPages>> make(std::size_t limit);
  ArenaPages(Descriptor file, Descriptor for_children, std::shared_ptr<SharedMapping> mapping)
      : file_(std::move(file)),
        for_children_(std::move(for_children)),
        mapping_(std::move(mapping)) {}

  std::size_t bytes() const { return mapping_->bytes(); }
  std::byte* at(std::uint64_t offset) const { return mapping_->memory() + offset; }
  /// Offset of the memory in the mapping, if the mapping contains it.
  std::optional<std::uint64_t> position_of(const std::byte* memory, std::size_t bytes) const;
  int descriptor() const { return file_.get(); }
  /// A read-only descriptor of the same file; none if /proc is not mounted.
  Descriptor open_read_only() const;

  /// Commits all pages of a range now; without memory, a later access would kill the process.
  bool warm(const Range& range);
  void punch(const std::vector<Range>& ranges);

  /// Marks the parts of a range that are still shared with peers as isolated and returns them.
  /// Under the lock.
  std::vector<Range> begin_isolation(const Range& range);
  /// Breaks the sharing of such a part while its block is in use. No store of this process is lost:
  /// a store that precedes the copy of its page is copied with it. Returns false if no memory is
  /// left for the copy; the caller must then call `cancel_isolation`.
  bool isolate(const Range& range);
  /// Under the lock.
  void cancel_isolation(const Range& range);
  /// Shares the pages of a freed block again. Returns false if the block is lost. Under the lock.
  bool rejoin(const Range& block);
  /// Without the lock.
  bool has_isolated() const { return isolated_now_.load(std::memory_order_acquire) != nullptr; }
  /// Under the lock.
  bool is_isolated(const Range& range) const { return isolated_.touches(range); }

  /// Call in a child right after fork, while only one thread runs. Gives the child a private copy
  /// of everything below `end`. Takes no lock. On failure the child goes on sharing pages. Pages
  /// that were isolated in the parent are already copies.
  void keep_own_copy(std::uint64_t end);

 private:
  void publish_isolated();
  bool map_pages(const Range& range, int how);

  GuardedDescriptor file_;
  Descriptor for_children_;  // same file; closed once a child has copied its memory from it
  std::shared_ptr<SharedMapping> mapping_;
  PageRanges isolated_;                                   // of blocks in use
  std::atomic<const PageRanges*> isolated_now_{nullptr};  // the same for a forked child; null: none
};

}  // namespace muster::shm
