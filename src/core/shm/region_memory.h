// SPDX-License-Identifier: BSD-3-Clause
/// The layout of a host region over any memory: a memfd shared by processes, or ordinary memory
/// shared by threads.
///
/// - header: magic, shape, the heap's state
/// - mailboxes: one cache line per place
/// - doorbells: one cache line per place; counts the streams that peers have opened to it
/// - read probes: one cache line per place; peers test by it whether they can read its memory
/// - ring control: per ordered pair of places, the positions of writer and reader
/// - heap table: two words per unit of the segment heap
/// - rings: the bytes of each ordered pair
/// - segments: the heap
///
/// Pages are touched only on use, so a region for many ranks with a large heap costs memory only as
/// it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/shm/host_region.h"
#include "core/tunables/tunables_fixed.h"

namespace muster::shm {

struct RegionShape {
  std::vector<int> ranks;  ///< job ranks, ascending
  /// Per ordered pair; rounded up to a power of two.
  std::size_t ring_bytes = fixed::kFragmentBytes / 2;
  std::size_t segment_bytes = std::size_t{1} << 33;
  std::size_t places = 0;  ///< number of ranks in the layout; 0: `ranks.size()`
  /// Tell peers how to read this process's memory in place (`HostRegion::can_read`).
  bool readable = true;
  std::uint64_t nonce = 0;  ///< random number that tells regions apart
};

/// Finds the memory of a local rank's arena (`HostRegion::arena_at`).
using ArenaLookup =
    std::function<std::byte*(int local_rank, std::uint64_t offset, std::size_t bytes)>;
/// Whether that lookup would answer without blocking (`HostRegion::arena_ready`).
using ArenaReady = std::function<bool(int local_rank)>;
/// Finds the process of a local rank (`HostRegion::process_of`).
using ProcessOf = std::function<std::shared_ptr<ProcessEnd>(int local_rank)>;

/// Size of the whole region in bytes.
std::size_t region_bytes(const RegionShape& shape);
/// Initializes the region in zeroed, page-aligned `memory`. Called once by its creator, before any
/// other rank sees it.
void lay_out_region(std::byte* memory, const RegionShape& shape);
/// Compares the header of `memory` (at least region_bytes(shape) long) with the shape.
/// Code::refused if they differ.
Status check_region(const std::byte* memory, const RegionShape& shape);
/// One rank's view. `owner` keeps the memory alive (a mapping, a vector). Checks the header.
/// Without a `lookup`, the ranks are threads of this process, which share its arena.
Result<std::unique_ptr<HostRegion>> open_region(std::byte* memory, const RegionShape& shape,
                                                int local_rank, std::shared_ptr<void> owner,
                                                ArenaLookup lookup = {}, ArenaReady ready = {},
                                                ProcessOf processes = {});

}  // namespace muster::shm
