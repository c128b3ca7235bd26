/// The layout of a host region over any memory: a memfd shared by processes, or ordinary memory
/// shared by threads.
///
/// - header: magic, shape, the heap's state
/// - mailboxes: one cache line for each place
/// - doorbells: one cache line for each place; counts the streams that peers have opened towards it
/// - cards: one cache line for each place; how to find out whether its process's memory can be read
/// - ring control: for each ordered pair of places, where its writer and its reader stand
/// - heap table: two words for each unit of the segment heap
/// - rings: the bytes of each ordered pair
/// - segments: the heap
///
/// Only what is used is ever touched, so that a region of many ranks and a large heap costs pages
/// only as it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "muster/base/tunables_fixed.h"
#include "muster/shm/host_region.h"

namespace muster::shm {

struct RegionShape {
  std::vector<int> ranks;  ///< job ranks, ascending
  std::size_t ring_bytes =
      fixed::kFragmentBytes / 2;  ///< of each ordered pair; rounded up to a power of two
  std::size_t segment_bytes = std::size_t{1} << 33;
  std::size_t places = 0;  ///< how many ranks the memory is laid out for; 0: as many as `ranks`
  bool readable =
      true;  ///< tell others how to read this process's memory where it is (`HostRegion::can_read`)
  std::uint64_t nonce = 0;  ///< tells regions apart: drawn by the maker
};

/// Finds the memory of a local rank's arena (`HostRegion::arena_at`).
using ArenaLookup =
    std::function<std::byte*(int local_rank, std::uint64_t offset, std::size_t bytes)>;
/// Says whether that look-up would answer at once (`HostRegion::arena_ready`).
using ArenaReady = std::function<bool(int local_rank)>;
/// Finds the process of a local rank (`HostRegion::process_of`).
using ProcessOf = std::function<std::shared_ptr<ProcessEnd>(int local_rank)>;

/// Bytes of the whole region.
std::size_t region_bytes(const RegionShape& shape);
/// Lays the region out in zeroed `memory`, page aligned; once, by its maker, before anybody else
/// looks.
void lay_out_region(std::byte* memory, const RegionShape& shape);
/// Whether the header of `memory` (at least region_bytes(shape) long) says what the shape says:
/// Code::refused where it does not.
Status check_region(const std::byte* memory, const RegionShape& shape);
/// A member's view. `owner` keeps the memory alive (a mapping, a vector). Checks the header.
/// Without a `lookup` the ranks are threads of this process and every arena is its own.
Result<std::unique_ptr<HostRegion>> open_region(std::byte* memory, const RegionShape& shape,
                                                int local_rank, std::shared_ptr<void> owner,
                                                ArenaLookup lookup = {}, ArenaReady ready = {},
                                                ProcessOf processes = {});

}  // namespace muster::shm
