// SPDX-License-Identifier: BSD-3-Clause
#include "core/shm/region_memory.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>

#include "core/base/log/log.h"
#include "core/shm/arena/arena.h"
#include "core/shm/region_view.h"

namespace muster::shm {
namespace {

std::size_t places_of(const RegionShape& shape) {
  return shape.places != 0 ? shape.places : shape.ranks.size();
}
constexpr std::size_t page_up(std::size_t bytes) {
  return (bytes + kRegionPage - 1) / kRegionPage * kRegionPage;
}

std::byte* own_arena_at(std::uint64_t offset, std::size_t bytes) {
  auto arena = Arena::of_process();
  return arena.ok() ? (*arena)->at(offset, bytes) : nullptr;
}

// Unique per job, rank and view. If the pid belongs to another process (possibly this one, if the
// peer is in another pid namespace), that process does not hold this word at the address.
std::uint64_t word_of(const RegionShape& shape, int local_rank, const void* view) {
  const std::uint64_t rank = static_cast<std::uint64_t>(local_rank) << 48;
  const std::uint64_t mixed = (shape.nonce ^ rank ^ reinterpret_cast<std::uint64_t>(view) ^
                               static_cast<std::uint64_t>(::getpid())) *
                              0x9e3779b97f4a7c15u;
  return mixed | 1;
}

}  // namespace

RegionLayout layout_of(const RegionShape& shape) {
  RegionLayout layout{};
  layout.places = places_of(shape);
  layout.ring_bytes = std::bit_ceil(std::max(shape.ring_bytes, kRegionPage));
  layout.units = page_up(shape.segment_bytes) / kSegmentUnit;
  const std::size_t pairs = layout.places * layout.places;
  layout.mailboxes = kRegionPage;
  layout.doorbells = layout.mailboxes + page_up(layout.places * sizeof(Mailbox));
  layout.read_probes = layout.doorbells + page_up(layout.places * sizeof(Doorbell));
  layout.controls = layout.read_probes + page_up(layout.places * sizeof(ReadProbe));
  layout.entries = layout.controls + page_up(pairs * sizeof(RingControl));
  layout.rings = layout.entries + page_up(layout.units * sizeof(SegmentEntry));
  layout.segments = layout.rings + pairs * layout.ring_bytes;
  layout.total = layout.segments + layout.units * kSegmentUnit;
  return layout;
}

std::size_t region_bytes(const RegionShape& shape) { return layout_of(shape).total; }

void lay_out_region(std::byte* memory, const RegionShape& shape) {
  const RegionLayout layout = layout_of(shape);
  auto& header = *reinterpret_cast<RegionHeader*>(memory);
  header.version = kRegionVersion;
  header.places = static_cast<std::uint32_t>(layout.places);
  header.ring_bytes = layout.ring_bytes;
  header.segment_bytes = layout.units * kSegmentUnit;
  header.total_bytes = layout.total;
  header.nonce = shape.nonce;
  std::atomic_ref(header.magic).store(kRegionMagic, std::memory_order_release);
}

Status check_region(const std::byte* memory, const RegionShape& shape) {
  const RegionLayout layout = layout_of(shape);
  const auto& header = *reinterpret_cast<const RegionHeader*>(memory);
  const auto refuse = [](const char* what, std::uint64_t expected, std::uint64_t found) {
    return Status(Code::refused, std::string("the shared region is not the one of this job: its ") +
                                     what + " is " + std::to_string(found) + ", expected " +
                                     std::to_string(expected) +
                                     "; do all ranks run the same build with the same options?");
  };
  const std::uint64_t magic =
      std::atomic_ref(const_cast<std::uint64_t&>(header.magic)).load(std::memory_order_acquire);
  if (magic != kRegionMagic) return refuse("magic number", kRegionMagic, magic);
  if (header.version != kRegionVersion) return refuse("version", kRegionVersion, header.version);
  if (header.places != layout.places)
    return refuse("number of ranks", layout.places, header.places);
  if (header.ring_bytes != layout.ring_bytes)
    return refuse("ring size", layout.ring_bytes, header.ring_bytes);
  if (header.segment_bytes != layout.units * kSegmentUnit) {
    return refuse("segment size", layout.units * kSegmentUnit, header.segment_bytes);
  }
  if (header.total_bytes != layout.total) return refuse("size", layout.total, header.total_bytes);
  if (header.nonce != shape.nonce) return refuse("nonce", shape.nonce, header.nonce);
  return {};
}

Result<std::unique_ptr<HostRegion>> open_region(std::byte* memory, const RegionShape& shape,
                                                int local_rank, std::shared_ptr<void> owner,
                                                ArenaLookup lookup, ArenaReady ready,
                                                ProcessOf processes) {
  const std::size_t members = shape.ranks.size();
  if (local_rank < 0 || static_cast<std::size_t>(local_rank) >= members ||
      members > places_of(shape)) {
    return Status(Code::invalid_argument, "place " + std::to_string(local_rank) +
                                              " of a host region for " + std::to_string(members) +
                                              " ranks with " + std::to_string(places_of(shape)) +
                                              " places");
  }
  if (Status checked = check_region(memory, shape); !checked) return checked;
  return std::unique_ptr<HostRegion>(new RegionView(memory, shape, local_rank, std::move(owner),
                                                    std::move(lookup), std::move(ready),
                                                    std::move(processes)));
}

RegionView::RegionView(std::byte* memory, const RegionShape& shape, int local_rank,
                       std::shared_ptr<void> owner, ArenaLookup lookup, ArenaReady ready,
                       ProcessOf processes)
    : memory_(memory),
      layout_(layout_of(shape)),
      ranks_(shape.ranks),
      local_rank_(local_rank),
      owner_(std::move(owner)),
      lookup_(std::move(lookup)),
      ready_(std::move(ready)),
      processes_(std::move(processes)),
      heap_(*reinterpret_cast<RegionHeader*>(memory), at_as<SegmentEntry>(layout_.entries),
            memory + layout_.segments, layout_.units),
      word_(word_of(shape, local_rank, this)),
      read_access_(ranks_.size()) {
  if (!shape.readable) return;
  ReadProbe& mine = read_probe(local_rank_);
  mine.process.store(static_cast<std::uint32_t>(::getpid()), std::memory_order_relaxed);
  mine.address.store(reinterpret_cast<std::uint64_t>(&word_), std::memory_order_relaxed);
  mine.word.store(word_, std::memory_order_release);
}

bool RegionView::can_read(int local_rank) {
  std::atomic<ReadAccess>& access = read_access_[static_cast<std::size_t>(local_rank)];
  if (const ReadAccess known = access.load(std::memory_order_relaxed); known != ReadAccess::unknown)
    return known == ReadAccess::yes;
  const std::uint64_t word = read_probe(local_rank).word.load(std::memory_order_acquire);
  if (word == 0 || mark_.forked()) return false;
  std::byte some;
  const bool reads =
      read(local_rank, read_probe(local_rank).address.load(std::memory_order_relaxed), {&some, 1});
  access.store(reads ? ReadAccess::yes : ReadAccess::no, std::memory_order_relaxed);
  return reads;
}

bool RegionView::keeps_memory(int local_rank) {
  if (!can_read(local_rank)) return true;  // unknown; assume that it does
  std::byte some;
  if (read(local_rank, read_probe(local_rank).address.load(std::memory_order_relaxed), {&some, 1}))
    return true;
  // A process in the middle of exec() refuses reads until it is done: the next look decides.
  ReadAccess refused = ReadAccess::no;
  return read_access_[static_cast<std::size_t>(local_rank)].compare_exchange_strong(
      refused, ReadAccess::yes, std::memory_order_relaxed);
}

// Every read also fetches the word from the same process in the same system call, because the pid
// may have been reused.
bool RegionView::read(int local_rank, std::uint64_t address, MutableBytes to) {
  const ReadProbe& theirs = read_probe(local_rank);
  const std::uint64_t word = theirs.word.load(std::memory_order_acquire);
  const auto process = static_cast<pid_t>(theirs.process.load(std::memory_order_relaxed));
  while (word != 0 && !to.empty()) {
    std::uint64_t found = 0;
    const iovec here[] = {{&found, sizeof(found)}, {to.data(), to.size()}};
    // NOLINTBEGIN(performance-no-int-to-ptr): addresses of the other process
    const iovec there[] = {
        {reinterpret_cast<void*>(theirs.address.load(std::memory_order_relaxed)), sizeof(found)},
        {reinterpret_cast<void*>(address), to.size()}};
    // NOLINTEND(performance-no-int-to-ptr)
    const ssize_t got = ::process_vm_readv(process, here, 2, there, 2, 0);
    if (got < 0 &&
        (errno == EPERM || errno == ENOSYS)) {  // remember, so that later groups do not try
      read_access_[static_cast<std::size_t>(local_rank)].store(ReadAccess::no,
                                                               std::memory_order_relaxed);
    }
    const auto copied = static_cast<std::size_t>(std::max<ssize_t>(got, 0));
    if (copied <= sizeof(found) || found != word) return false;
    to = to.subspan(copied - sizeof(found));
    address += copied - sizeof(found);
  }
  return word != 0;
}

SharedRing RegionView::ring(int from, int to) {
  const std::size_t pair =
      static_cast<std::size_t>(from) * layout_.places + static_cast<std::size_t>(to);
  return {at_as<RingControl>(layout_.controls) + pair,
          memory_ + layout_.rings + pair * layout_.ring_bytes, layout_.ring_bytes};
}

Result<std::uint64_t> RegionView::claim(std::size_t bytes) {
  if (mark_.forked())
    return Status(Code::aborted, "a forked child cannot claim memory of its parent's host region");
  auto offset = heap_.claim(bytes);
  if (!offset) return offset.status();
  return layout_.segments + *offset;
}

void RegionView::release(std::uint64_t offset) {
  if (mark_.forked()) return;
  if (offset < layout_.segments || !heap_.release(offset - layout_.segments)) {
    log(LogLevel::warning, "a segment of the host region was released that is not in use (offset " +
                               std::to_string(offset) + ")");
  }
}

std::byte* RegionView::arena_at(int local_rank, std::uint64_t offset, std::size_t bytes) {
  return lookup_ ? lookup_(local_rank, offset, bytes) : own_arena_at(offset, bytes);
}

}  // namespace muster::shm
