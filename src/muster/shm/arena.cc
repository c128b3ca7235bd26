#include "muster/shm/arena.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <limits>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "muster/base/clock.h"
#include "muster/base/fork_guard.h"
#include "muster/base/log.h"
#include "muster/shm/arena_heap.h"
#include "muster/shm/host_memory.h"
#include "muster/shm/page_ranges.h"
#include "muster/shm/quarantine.h"
#include "muster/shm/segment_heap.h"
#include "muster/shm/shared_mapping.h"

namespace muster::shm {
namespace {

constexpr std::size_t kLeastAddressSpace = std::size_t{64} << 30;
constexpr std::size_t kMostAddressSpace = std::size_t{1} << 40;
constexpr std::size_t kFewestUseful = std::size_t{1} << 28;
// For requests from this size on the system is asked what it has before it is made to give it.
constexpr std::size_t kAskedBytes = std::size_t{16} << 20;
constexpr Duration kBetweenLooks = std::chrono::milliseconds(10);
// MADV_POPULATE_WRITE (Linux 5.14), which not all C libraries know.
constexpr int kPopulateWrite = 23;

std::size_t largest_file() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY
             ? limit.rlim_cur
             : kMostAddressSpace;
}

/// The pages that [range) fills. The first and the last page of its block count as filled: of what
/// else stands there nothing is large enough to be lent by itself.
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
  ProcessArena(Descriptor file, Descriptor for_children, std::shared_ptr<SharedMapping> mapping,
               std::size_t limit, ProcessArena* inherited)
      : file_(std::move(file)),
        for_children_(std::move(for_children)),
        mapping_(std::move(mapping)),
        inherited_(inherited),
        heap_(mapping_->bytes(), limit, ArenaLimits().keep) {}

  Result<std::byte*> allocate(std::size_t bytes) override;
  void free(std::byte* memory) override;
  void quarantine(const std::byte* memory, std::size_t bytes, std::function<bool()> held) override;
  void trim() override;
  void set_limits(const ArenaLimits& limits) override;
  void keep_more(std::ptrdiff_t bytes) override;
  std::optional<std::uint64_t> offset_of(const std::byte* memory, std::size_t bytes) const override;
  /// The same of memory that is this process's alone for now.
  std::optional<std::uint64_t> position_of(const std::byte* memory, std::size_t bytes) const;
  std::byte* at(std::uint64_t offset, std::size_t bytes) const override {
    return offset <= mapping_->bytes() && bytes <= mapping_->bytes() - offset
               ? mapping_->memory() + offset
               : nullptr;
  }
  void make_read_only() override;
  bool is_read_only() const override { return read_only_.load(std::memory_order_acquire); }
  int descriptor() const override {
    return is_read_only() && readable_ ? readable_.get() : file_.get();
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
  void keep_own_copy();

 private:
  std::optional<std::byte*> try_allocate(std::size_t bytes, bool& refused);
  bool warm(const ArenaHeap::Range& range);
  void punch(const std::vector<ArenaHeap::Range>& ranges);
  void give_back(const std::vector<ArenaHeap::Range>& holes);
  bool look_at_quarantine(bool at_once);
  void isolated_changed();
  bool isolate(const ArenaHeap::Range& range);
  bool map_pages(const ArenaHeap::Range& range, int how);
  bool rejoin(const ArenaHeap::Range& range);
  std::size_t most_kept() const {
    return keep_ + std::min(kept_besides_, std::numeric_limits<std::size_t>::max() - keep_);
  }

  GuardedDescriptor file_;
  Descriptor
      for_children_;  // the same file: what a forked child copies its memory from, then closes
  GuardedDescriptor readable_;
  std::atomic<bool> read_only_{false};
  std::shared_ptr<SharedMapping> mapping_;
  ProcessArena* inherited_;  // of the process that this one was forked from
  ProcessMark mark_;
  mutable std::mutex lock_;
  ArenaHeap heap_;
  Quarantine quarantine_;
  std::atomic<bool> quarantines_{false};  // there is something in it
  TimePoint next_look_{};
  PageRanges isolated_;                                   // of blocks in use
  std::atomic<const PageRanges*> isolated_now_{nullptr};  // the same for a forked child; null: none
  std::size_t keep_ = ArenaLimits().keep, kept_besides_ = 0;
  std::uint64_t returned_ = 0;
  std::uint64_t allocations_ = 0;
};

// Arenas live as long as the process: tensors may outlive every group.
std::atomic<ProcessArena*> g_arena{nullptr};

void keep_own_copy_in_child() {
  if (ProcessArena* const arena = g_arena.load(std::memory_order_acquire)) arena->keep_own_copy();
}

Result<std::unique_ptr<ProcessArena>> ProcessArena::make(ProcessArena* inherited) {
  static const int armed = pthread_atfork(nullptr, nullptr, keep_own_copy_in_child);
  static_cast<void>(armed);
  // The file has its whole size at once (it is sparse): then no mapping of a peer ever ends before
  // an offset that we hand out.
  const std::size_t limit = host_memory().limit;
  std::size_t bytes =
      std::min(std::clamp(std::bit_ceil(limit), kLeastAddressSpace, kMostAddressSpace),
               largest_file() / ArenaHeap::kPage * ArenaHeap::kPage);
  for (;; bytes = bytes / 2 / ArenaHeap::kPage * ArenaHeap::kPage) {
    auto file = make_memory_file("muster-arena", bytes);
    if (!file) return file.status().with_context("making the shared arena");
    auto mapping = map_shared(file->get(), bytes);
    if (mapping) {
      Descriptor for_children(::fcntl(file->get(), F_DUPFD_CLOEXEC, 3));
      return std::make_unique<ProcessArena>(std::move(*file), std::move(for_children),
                                            std::move(*mapping), std::min(bytes, limit), inherited);
    }
    if (bytes / 2 < kFewestUseful) return mapping.status().with_context("making the shared arena");
  }
}

// In a child, right after the fork, where only this thread runs. Nothing here takes a lock. Where
// it fails the child goes on sharing pages. What was its parent's alone is a copy already.
void ProcessArena::keep_own_copy() {
  if (!for_children_) return;
  const PageRanges none;
  const PageRanges* const isolated = isolated_now_.load(std::memory_order_acquire);
  (isolated != nullptr ? *isolated : none)
      .each_gap({0, heap_.end()}, [this](const ArenaHeap::Range& range) {
        // Elsewhere first: a mapping over the old one that failed would leave nothing.
        void* const copy =
            ::mmap(nullptr, range.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                   for_children_.get(), static_cast<off_t>(range.offset));
        if (copy != MAP_FAILED &&
            ::mremap(copy, range.bytes, range.bytes, MREMAP_MAYMOVE | MREMAP_FIXED,
                     mapping_->memory() + range.offset) == MAP_FAILED) {
          ::munmap(copy, range.bytes);
        }
      });
  for_children_.reset();
}

Result<std::byte*> ProcessArena::allocate(std::size_t bytes) {
  if (forked())
    return Status(Code::aborted,
                  "a forked child cannot take memory from its parent's shared arena");
  look_at_quarantine(false);
  bool refused = false;
  if (const auto memory = try_allocate(bytes, refused)) return *memory;
  const bool came_back = look_at_quarantine(true);
  ArenaStats now = stats();
  // What is kept may stand in the way: of a block in one piece, of the limit, or of the system.
  if ((came_back || now.bytes_kept > 0) &&
      bytes <= now.most - std::min(now.most, now.bytes_in_use + now.bytes_quarantined)) {
    trim();
    refused = false;
    if (const auto memory = try_allocate(bytes, refused)) return *memory;
    now = stats();
  }
  return Status(Code::exhausted,
                "the shared arena has no room for " + std::to_string(bytes) +
                    " bytes: " + std::to_string(now.bytes_in_use) + " of " +
                    std::to_string(now.most) + " are in use" +
                    (now.bytes_quarantined > 0
                         ? ", " + std::to_string(now.bytes_quarantined) +
                               " more are kept out of use, since a peer that is stopped "
                               "in a call which failed may still write to them"
                         : "") +
                    (refused ? ", and the system gives no more memory" : ""));
}

std::optional<std::byte*> ProcessArena::try_allocate(std::size_t bytes, bool& refused) {
  std::optional<ArenaHeap::Taken> taken;
  {
    const std::lock_guard hold(lock_);
    taken = heap_.allocate(bytes);
    if (!taken) return std::nullopt;
    ++allocations_;
  }
  if (taken->cold.bytes == 0) return mapping_->memory() + taken->offset;
  // Without the lock: it may take milliseconds.
  const bool warmed = warm(taken->cold);
  if (!warmed) punch({taken->cold});  // some of it may have been given
  const std::lock_guard hold(lock_);
  if (warmed) {
    heap_.warmed(*taken);
    return mapping_->memory() + taken->offset;
  }
  heap_.refused(*taken);
  --allocations_;
  refused = true;
  return std::nullopt;
}

/// Makes the system give memory for all pages of a range, now: later it could only end the process.
bool ProcessArena::warm(const ArenaHeap::Range& range) {
  if (range.bytes >= kAskedBytes && host_memory().available < range.bytes) return false;
  if (::madvise(mapping_->memory() + range.offset, range.bytes, kPopulateWrite) == 0) return true;
  int done = 0;
  do {
    done = ::fallocate(file_.get(), FALLOC_FL_KEEP_SIZE, static_cast<off_t>(range.offset),
                       static_cast<off_t>(range.bytes));
  } while (done != 0 && errno == EINTR);
  return done == 0 || errno == EOPNOTSUPP ||
         errno == ENOSYS;  // where it cannot be had ahead, it comes with the first touch
}

void ProcessArena::punch(const std::vector<ArenaHeap::Range>& ranges) {
  for (const auto& range : ranges) {
    if (::fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    static_cast<off_t>(range.offset), static_cast<off_t>(range.bytes)) != 0) {
      discard_pages(mapping_->memory() + range.offset, range.bytes);
    }
  }
}

void ProcessArena::free(std::byte* memory) {
  // What a child drops may still be in use in its parent, whose bookkeeping the child has only a
  // copy of.
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
    if (known && rejoin({*offset, bytes}) && !quarantine_.keep({*offset, bytes}))
      heap_.free(*offset, holes);
  }
  if (!known) {
    log(LogLevel::error,
        "memory was given back to the shared arena that was not taken from it; ignored");
    return;
  }
  give_back(holes);
  look_at_quarantine(false);
}

void ProcessArena::give_back(const std::vector<ArenaHeap::Range>& holes) {
  if (holes.empty()) return;
  punch(holes);
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
  std::vector<ArenaHeap::Range> alone;
  {
    const std::lock_guard hold(lock_);
    quarantine_.add({*offset, bytes}, std::move(held));
    quarantines_.store(true, std::memory_order_relaxed);
    const ArenaHeap::Range block = heap_.pages_around(*offset);
    isolated_.each_gap(whole_pages({*offset, bytes}, block),
                       [&](const ArenaHeap::Range& range) { alone.push_back(range); });
    for (const auto& range : alone) isolated_.insert(range);
    isolated_changed();
  }
  for (const auto& range : alone) {
    if (isolate(range)) continue;
    log(LogLevel::warning, "a peer that is stopped in a call which failed may still write to " +
                               std::to_string(range.bytes) +
                               " bytes of that call's memory when it goes on: no memory is left "
                               "for a copy of them; make new "
                               "tensors instead of using the call's again");
    const std::lock_guard hold(lock_);
    isolated_.erase(range);
    isolated_changed();
  }
}

/// Under the lock. A forked child finds the one or the other whole.
void ProcessArena::isolated_changed() {
  delete isolated_now_.exchange(isolated_.empty() ? nullptr : new PageRanges(isolated_),
                                std::memory_order_acq_rel);
}

/// Breaks the sharing of pages in use, for as long as they are. No store of this process is lost
/// meanwhile: one that comes before its page is copied is copied with it.
bool ProcessArena::isolate(const ArenaHeap::Range& range) {
  if (range.bytes >= kAskedBytes && host_memory().available < range.bytes) return false;
  if (!map_pages(range, MAP_PRIVATE)) return false;
  std::byte* const memory = mapping_->memory() + range.offset;
  if (::madvise(memory, range.bytes, kPopulateWrite) == 0) return true;
  if (errno != EINVAL) return !map_pages(range, MAP_SHARED);
  for (std::size_t at = 0; at < range.bytes; at += ArenaHeap::kPage) {  // before Linux 5.14
    const std::atomic_ref<unsigned char> byte(reinterpret_cast<unsigned char&>(memory[at]));
    unsigned char there = byte.load(std::memory_order_relaxed);
    while (!byte.compare_exchange_weak(there, there)) continue;
  }
  return true;
}

bool ProcessArena::map_pages(const ArenaHeap::Range& range, int how) {
  return ::mmap(mapping_->memory() + range.offset, range.bytes, PROT_READ | PROT_WRITE,
                how | MAP_FIXED, file_.get(), static_cast<off_t>(range.offset)) != MAP_FAILED;
}

/// Shares the pages of a block again that has been freed. Under the lock.
bool ProcessArena::rejoin(const ArenaHeap::Range& block) {
  bool all = true;
  if (isolated_.empty()) return all;
  for (const auto& range : isolated_.take_within(block)) {
    const bool shared = map_pages(range, MAP_SHARED);
    if (!shared) isolated_.insert(range);  // such a block is lost
    all = all && shared;
  }
  isolated_changed();
  return all;
}

/// To ask who holds what takes system calls: now and then, unless `at_once`. Whether a block has
/// come back.
bool ProcessArena::look_at_quarantine(bool at_once) {
  if (!quarantines_.load(std::memory_order_relaxed)) return false;
  Quarantine::Over over;  // its holders go without the lock: they may unmap a region
  std::vector<ArenaHeap::Range> holes;
  {
    const std::lock_guard hold(lock_);
    const TimePoint now = steady_clock().now();
    if (!at_once && now < next_look_) return false;
    next_look_ = now + kBetweenLooks;
    over = quarantine_.sweep();
    for (const std::uint64_t block : over.blocks) heap_.free(block, holes);
    quarantines_.store(!quarantine_.empty(), std::memory_order_relaxed);
  }
  give_back(holes);
  return !over.blocks.empty();
}

void ProcessArena::trim() {
  if (forked()) return;
  look_at_quarantine(true);
  std::vector<ArenaHeap::Range> holes;
  {
    const std::lock_guard hold(lock_);
    heap_.trim(holes);
  }
  give_back(holes);
}

void ProcessArena::set_limits(const ArenaLimits& limits) {
  const std::size_t most = limits.most != 0 ? limits.most : host_memory().limit;
  std::size_t kept = 0;
  {
    const std::lock_guard hold(lock_);
    keep_ = limits.keep;
    kept = most_kept();
    heap_.set_limits(most, kept);
  }
  const ArenaStats now = stats();
  if (now.bytes_kept > kept || now.bytes_in_use + now.bytes_quarantined + now.bytes_kept > most)
    trim();
}

void ProcessArena::keep_more(std::ptrdiff_t bytes) {
  const std::lock_guard hold(lock_);
  kept_besides_ += static_cast<std::size_t>(bytes);
  heap_.set_limits(heap_.limit(), most_kept());
}

void ProcessArena::make_read_only() {
  const std::lock_guard hold(lock_);
  if (!readable_) {
    const std::string path = "/proc/self/fd/" + std::to_string(file_.get());
    readable_ = GuardedDescriptor(Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC)));
    if (!readable_)
      log(LogLevel::warning,
          "the shared arena cannot be opened for reading only: /proc is not there; peers are "
          "trusted not to write");
  }
  read_only_.store(true, std::memory_order_release);
}

std::optional<std::uint64_t> ProcessArena::offset_of(const std::byte* memory,
                                                     std::size_t bytes) const {
  const auto offset = position_of(memory, bytes);
  if (!offset || forked() || isolated_now_.load(std::memory_order_acquire) == nullptr)
    return offset;
  const std::lock_guard hold(lock_);
  return isolated_.touches({*offset, bytes}) ? std::nullopt : offset;
}

std::optional<std::uint64_t> ProcessArena::position_of(const std::byte* memory,
                                                       std::size_t bytes) const {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const auto base = reinterpret_cast<std::uintptr_t>(mapping_->memory());
  if (address < base || address - base > mapping_->bytes() ||
      bytes > mapping_->bytes() - (address - base))
    return std::nullopt;
  return address - base;
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
  // No lock: one held by another thread at a fork would stay held in the child.
  ProcessArena* there = g_arena.load(std::memory_order_acquire);
  auto made = ProcessArena::make(there);
  if (!made) return made.status();
  if (g_arena.compare_exchange_strong(there, made->get(), std::memory_order_acq_rel))
    return static_cast<Arena*>(made->release());
  return static_cast<Arena*>(there);  // another thread was faster
}

}  // namespace muster::shm
