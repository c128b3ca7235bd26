// SPDX-License-Identifier: BSD-3-Clause
#include "core/shm/arena/arena_pages.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <string>

#include "core/base/process/limits.h"
#include "core/shm/arena/segment_heap.h"

namespace muster::shm {
namespace {

using Range = ArenaHeap::Range;

constexpr std::size_t kLeastAddressSpace = std::size_t{64} << 30;  // limit: of address space
constexpr std::size_t kMostAddressSpace = std::size_t{1} << 40;    // limit: of address space
constexpr std::size_t kFewestUseful = std::size_t{1} << 28;        // limit: of address space
// Requests of at least this size first check how much memory the system has available.
constexpr std::size_t kAskedBytes = std::size_t{16} << 20;  // limit: what a machine can lack
constexpr int kPopulateWrite = 23;  // limit: MADV_POPULATE_WRITE (Linux 5.14), for old C libraries

bool system_lacks(std::size_t bytes) {
  return bytes >= kAskedBytes && host_memory().available < bytes;
}

/// Every rank of a host maps the arenas of all others whole. If address space is limited, nothing
/// tells how many will fit, and a peer that cannot map one could not make the call.
Status check_address_space() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {};
  return Status(Code::exhausted,
                "there is no shared arena: address space is limited to " +
                    std::to_string(limit.rlim_cur) +
                    " bytes (ulimit -v), and that of all ranks of this host may not fit into it");
}

}  // namespace

Result<std::unique_ptr<ArenaPages>> ArenaPages::make(std::size_t limit) {
  if (Status room = check_address_space(); !room) return room;
  std::size_t bytes =
      std::min(std::clamp(std::bit_ceil(limit), kLeastAddressSpace, kMostAddressSpace),
               static_cast<std::size_t>(largest_file()) / ArenaHeap::kPage * ArenaHeap::kPage);
  for (;; bytes = bytes / 2 / ArenaHeap::kPage * ArenaHeap::kPage) {
    auto file = make_memory_file("muster-arena", bytes);
    if (!file) return file.status().with_context("making the shared arena");
    auto mapping = map_shared(file->get(), bytes);
    if (mapping) {
      Descriptor for_children(::fcntl(file->get(), F_DUPFD_CLOEXEC, 3));
      return std::make_unique<ArenaPages>(std::move(*file), std::move(for_children),
                                          std::move(*mapping));
    }
    if (bytes / 2 < kFewestUseful) return mapping.status().with_context("making the shared arena");
  }
}

Descriptor ArenaPages::open_read_only() const {
  const std::string path = "/proc/self/fd/" + std::to_string(file_.get());
  return Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
}

std::optional<std::uint64_t> ArenaPages::position_of(const std::byte* memory,
                                                     std::size_t bytes) const {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const auto base = reinterpret_cast<std::uintptr_t>(mapping_->memory());
  if (address < base || address - base > mapping_->bytes() ||
      bytes > mapping_->bytes() - (address - base))
    return std::nullopt;
  return address - base;
}

bool ArenaPages::warm(const Range& range) {
  if (system_lacks(range.bytes)) return false;
  if (::madvise(at(range.offset), range.bytes, kPopulateWrite) == 0) return true;
  int done = 0;
  do {
    done = ::fallocate(file_.get(), FALLOC_FL_KEEP_SIZE, static_cast<off_t>(range.offset),
                       static_cast<off_t>(range.bytes));
  } while (done != 0 && errno == EINTR);
  return done == 0 || errno == EOPNOTSUPP ||
         errno == ENOSYS;  // not supported: memory is committed on first touch
}

void ArenaPages::punch(const std::vector<Range>& ranges) {
  for (const auto& range : ranges) {
    if (::fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    static_cast<off_t>(range.offset), static_cast<off_t>(range.bytes)) != 0) {
      discard_pages(at(range.offset), range.bytes);
    }
  }
}

/// Published as a whole, so that a forked child sees either the old or the new set.
void ArenaPages::publish_isolated() {
  delete isolated_now_.exchange(isolated_.empty() ? nullptr : new PageRanges(isolated_),
                                std::memory_order_acq_rel);
}

std::vector<Range> ArenaPages::begin_isolation(const Range& range) {
  std::vector<Range> shared;
  isolated_.each_gap(range, [&](const Range& gap) { shared.push_back(gap); });
  for (const Range& each : shared) isolated_.insert(each);
  publish_isolated();
  return shared;
}

void ArenaPages::cancel_isolation(const Range& range) {
  isolated_.erase(range);
  publish_isolated();
}

bool ArenaPages::isolate(const Range& range) {
  if (system_lacks(range.bytes)) return false;
  if (!map_pages(range, MAP_PRIVATE)) return false;
  std::byte* const memory = at(range.offset);
  if (::madvise(memory, range.bytes, kPopulateWrite) == 0) return true;
  if (errno != EINVAL) return !map_pages(range, MAP_SHARED);
  for (std::size_t at = 0; at < range.bytes; at += ArenaHeap::kPage) {  // before Linux 5.14
    const std::atomic_ref<unsigned char> byte(reinterpret_cast<unsigned char&>(memory[at]));
    unsigned char there = byte.load(std::memory_order_relaxed);
    while (!byte.compare_exchange_weak(there, there)) continue;
  }
  return true;
}

bool ArenaPages::map_pages(const Range& range, int how) {
  return ::mmap(at(range.offset), range.bytes, PROT_READ | PROT_WRITE, how | MAP_FIXED, file_.get(),
                static_cast<off_t>(range.offset)) != MAP_FAILED;
}

bool ArenaPages::rejoin(const Range& block) {
  bool all = true;
  if (isolated_.empty()) return all;
  for (const auto& range : isolated_.remove_within(block)) {
    const bool shared = map_pages(range, MAP_SHARED);
    if (!shared) isolated_.insert(range);  // this block is lost
    all = all && shared;
  }
  publish_isolated();
  return all;
}

void ArenaPages::keep_own_copy(std::uint64_t end) {
  if (!for_children_) return;
  const PageRanges none;
  const PageRanges* const isolated = isolated_now_.load(std::memory_order_acquire);
  (isolated != nullptr ? *isolated : none).each_gap({0, end}, [this](const Range& range) {
    // Map elsewhere first: a failed MAP_FIXED over the old mapping would leave a hole.
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

}  // namespace muster::shm
