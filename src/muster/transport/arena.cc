#include "muster/transport/arena.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <mutex>
#include <string>
#include <vector>

#include "muster/base/fork_guard.h"
#include "muster/base/log.h"
#include "muster/transport/arena_heap.h"
#include "muster/transport/segment_heap.h"
#include "muster/transport/shared_mapping.h"

namespace muster::transport {
namespace {

constexpr std::size_t kLeastAddressSpace = std::size_t{64} << 30;
constexpr std::size_t kMostAddressSpace = std::size_t{1} << 40;
constexpr std::size_t kFewestUseful = std::size_t{1} << 28;
// Freed pages that are kept for the next tensor: as many as a training step usually frees and takes again.
constexpr std::size_t kKeptBytes = std::size_t{256} << 20;

std::size_t physical_memory() {
  return static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

std::size_t largest_file() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY ? limit.rlim_cur : kMostAddressSpace;
}

class ProcessArena final : public Arena {
 public:
  static Result<std::unique_ptr<ProcessArena>> make(const ProcessArena* inherited);
  ProcessArena(Descriptor file, std::shared_ptr<SharedMapping> mapping, std::size_t limit, const ProcessArena* inherited)
      : file_(std::move(file)), mapping_(std::move(mapping)), limit_(limit), inherited_(inherited), heap_(limit, kKeptBytes) {}

  Result<std::byte*> allocate(std::size_t bytes) override;
  void free(std::byte* memory) override;
  std::optional<std::uint64_t> offset_of(const std::byte* memory, std::size_t bytes) const override;
  std::byte* at(std::uint64_t offset, std::size_t bytes) const override {
    return offset <= mapping_->bytes() && bytes <= mapping_->bytes() - offset ? mapping_->memory() + offset : nullptr;
  }
  int descriptor() const override { return file_.get(); }
  std::size_t bytes_in_use() const override {
    const std::lock_guard hold(lock_);
    return heap_.bytes_in_use();
  }
  bool forked() const { return mark_.forked(); }

 private:
  GuardedDescriptor file_;
  std::shared_ptr<SharedMapping> mapping_;
  std::size_t limit_;
  const ProcessArena* inherited_;  // of the process that this one was forked from
  ProcessMark mark_;
  mutable std::mutex lock_;
  ArenaHeap heap_;
};

Result<std::unique_ptr<ProcessArena>> ProcessArena::make(const ProcessArena* inherited) {
  // The file has its whole size at once (it is sparse): then no mapping of a peer ever ends before an offset that we hand out.
  std::size_t bytes = std::min(std::clamp(std::bit_ceil(physical_memory()), kLeastAddressSpace, kMostAddressSpace), largest_file());
  for (;; bytes /= 2) {
    auto file = make_memory_file("muster-arena", bytes);
    if (!file) return file.status().with_context("making the shared arena");
    auto mapping = map_shared(file->get(), bytes);
    if (mapping)
      return std::make_unique<ProcessArena>(std::move(*file), std::move(*mapping), std::min(bytes, physical_memory()), inherited);
    if (bytes / 2 < kFewestUseful) return mapping.status().with_context("making the shared arena");
  }
}

Result<std::byte*> ProcessArena::allocate(std::size_t bytes) {
  if (forked()) return Status(Code::aborted, "a forked child cannot take memory from its parent's shared arena");
  const std::lock_guard hold(lock_);
  const auto offset = heap_.allocate(bytes);
  if (!offset) {
    return Status(Code::exhausted, "the shared arena has no room for " + std::to_string(bytes) +
                                       " bytes: " + std::to_string(heap_.bytes_in_use()) + " of " + std::to_string(limit_) + " are in use");
  }
  return mapping_->memory() + *offset;
}

void ProcessArena::free(std::byte* memory) {
  // What a child drops may still be in use in its parent, whose bookkeeping the child has only a copy of.
  if (memory == nullptr || forked()) return;
  const auto offset = offset_of(memory, 0);
  for (const ProcessArena* parent = inherited_; !offset && parent != nullptr; parent = parent->inherited_) {
    if (parent->offset_of(memory, 0)) return;
  }
  std::vector<ArenaHeap::Range> punch;
  const std::lock_guard hold(lock_);
  if (!offset || !heap_.free(*offset, punch)) {
    log(LogLevel::error, "memory was given back to the shared arena that was not taken from it; ignored");
    return;
  }
  for (const auto& range : punch) {
    if (::fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(range.offset),
                    static_cast<off_t>(range.bytes)) != 0) {
      discard_pages(mapping_->memory() + range.offset, range.bytes);
    }
  }
}

std::optional<std::uint64_t> ProcessArena::offset_of(const std::byte* memory, std::size_t bytes) const {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const auto base = reinterpret_cast<std::uintptr_t>(mapping_->memory());
  if (address < base || address - base > mapping_->bytes() || bytes > mapping_->bytes() - (address - base)) return std::nullopt;
  return address - base;
}

// Arenas live as long as the process: tensors may outlive every group.
std::atomic<ProcessArena*> g_arena{nullptr};

}  // namespace

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
  if (g_arena.compare_exchange_strong(there, made->get(), std::memory_order_acq_rel)) return static_cast<Arena*>(made->release());
  return static_cast<Arena*>(there);  // another thread was faster
}

}  // namespace muster::transport
