#include "core/collective/region/source_table.h"

#include <algorithm>

#include "core/collective/kernels/kernels.h"
#include "core/shm/cache_lines.h"

namespace muster::collective::region {

using shm::BufferLocation;
using shm::Line;
using shm::ReaderSlice;

bool SourceTable::mapped(const TransferPlan& plan, int member) {
  const Line& theirs = segment_.line(member);
  const bool arena = theirs.location == BufferLocation::arena ||
                     (plan.per_member && theirs.location == BufferLocation::window &&
                      segment_.table(member)[segment_.rank()].location == BufferLocation::arena);
  return !arena || peers_.arena_ready(member);
}

Status SourceTable::resolve(const Args& args, const TransferPlan& plan, int member) {
  const shm::SegmentLayout& layout = segment_.layout();
  const int rank = segment_.rank();
  const Line& theirs = segment_.line(member);
  SourceMemory& source = (*this)[member];
  source = {theirs.location, nullptr, theirs.bytes, 0, theirs.first_window};
  std::uint64_t where = theirs.input;
  std::uint64_t in_slot = layout.table_bytes;
  if (shm::is_row(theirs.location)) {
    source.bytes /= layout.members - 1;
    in_slot = source.bytes * shm::place_in_row(member, rank);
  } else if (plan.per_member && theirs.location != BufferLocation::nothing) {
    const ReaderSlice slice = segment_.table(member)[rank];
    source.location = slice.location;
    source.bytes = slice.bytes;
    source.granted = slice.granted;
    uses_grants_ = uses_grants_ || slice.granted;
    source.column = static_cast<std::size_t>(rank) * layout.column_bytes;
    where = in_slot = slice.where;
  }
  const std::size_t expected = output_for(args, member).size();
  if (source.bytes != expected)
    return failure_.unexpected_size(args, member, source.bytes, expected);
  switch (source.location) {
    case BufferLocation::nothing:
    case BufferLocation::window: break;
    case BufferLocation::line: source.data = theirs.payload; break;
    case BufferLocation::slot:
    case BufferLocation::slot_row: source.data = segment_.slot(member) + in_slot; break;
    case BufferLocation::line_row: source.data = theirs.payload + in_slot; break;
    case BufferLocation::arena:
      reads_in_place_ = true;
      source.data = arena_at(member, where, source.bytes);
      if (source.data == nullptr) return failure_.cannot_map(member, source.bytes);
      break;
    case BufferLocation::memory:
      reads_in_place_ = true;
      source.address = where;
      break;
  }
  return {};
}

Status SourceTable::resolve_share(const Args& args, int member, std::size_t bytes) {
  const Line& theirs = segment_.line(member);
  SourceMemory& source = (*this)[member];
  source = {theirs.location, nullptr, theirs.bytes, 0, theirs.first_window};
  if (source.bytes != bytes) return failure_.differing_sizes(args, member, source.bytes, bytes);
  if (source.location == BufferLocation::arena) {
    reads_in_place_ = true;
    source.data = arena_at(member, theirs.input, source.bytes);
    if (source.data == nullptr) return failure_.cannot_map(member, source.bytes);
  }
  return {};
}

/// Excludes windows and a member's own memory, even if meant for another reader: the sender waits
/// for the drained counter of every member, including this one.
bool SourceTable::resolve_staged(const Args& args, const TransferPlan& plan, int member) {
  const Line& theirs = segment_.line(member);
  SourceMemory& source = (*this)[member];
  source.location = theirs.location;
  if (source.location == BufferLocation::window || shm::in_place(source.location)) return false;
  source.bytes = theirs.bytes;
  const std::size_t expected = output_for(args, member).size();
  if (source.location == BufferLocation::line) {
    source.data = theirs.payload;
  } else if (shm::is_row(source.location)) {
    source.bytes = expected;
    if (expected * (segment_.layout().members - 1) != theirs.bytes) return false;
    source.data =
        (source.location == BufferLocation::line_row ? theirs.payload : segment_.slot(member)) +
        shm::place_in_row(member, segment_.rank()) * expected;
  } else if (source.location == BufferLocation::slot) {
    const std::byte* const slot = segment_.slot(member);
    source.data = slot + segment_.layout().table_bytes;
    if (plan.per_member) {
      const ReaderSlice& mine = segment_.table(member)[segment_.rank()];
      source.bytes = mine.bytes;
      source.data = slot + mine.where;
    }
  }
  return source.bytes == expected;
}

SourceTable::SourcePiece SourceTable::piece(const TransferPlan& plan, int member,
                                            std::size_t step) const {
  const SourceMemory& source = (*this)[member];
  const std::size_t most = source.location == BufferLocation::memory
                               ? std::max(plan.chunk, tunables().work_quantum)
                               : plan.chunk;
  const std::size_t at = std::min(step * most, source.bytes);
  return {at, std::min(most, source.bytes - at)};
}

const std::byte* SourceTable::chunk(const TransferPlan& plan, int member, std::size_t step) const {
  const SourceMemory& source = (*this)[member];
  if (source.location != BufferLocation::window) return source.data + step * plan.chunk;
  return segment_.window(member, source.first_window + step) + source.column;
}

Status SourceTable::copy_piece(const Args& args, const TransferPlan& plan, int member,
                               std::size_t step) {
  const SourceMemory& source = (*this)[member];
  const SourcePiece part = piece(plan, member, step);
  const MutableBytes to = output_for(args, member).subspan(part.at, part.bytes);
  if (source.location == BufferLocation::memory) {
    if (!peers_.read(member, source.address + part.at, to))
      return failure_.cannot_read(member, part.bytes);
  } else if (plan.reclaims && shm::is_staged(source.location)) {
    shm::copy_and_reclaim_lines(to.data(), chunk(plan, member, step), part.bytes, plan.past_caches);
  } else {
    copy_bytes(to.data(), chunk(plan, member, step), part.bytes, plan.past_caches);
  }
  return {};
}

void SourceTable::reduce(const Args& args, bool reclaims, std::byte* to, std::size_t bytes) {
  const int size = segment_.size();
  bool any = false;
  for (int member = 0; reclaims && member < size; ++member) any = any || may_reclaim(member);
  const std::size_t most = any ? fixed::kReclaimBlock : bytes;
  for (std::size_t done = 0; done < bytes; done += most) {
    const std::size_t block = std::min(most, bytes - done);
    reduce_complete(to + done, inputs_, elements_in(block, args.dtype), args.dtype, args.reduce);
    for (int member = 0; any && member < size; ++member) {
      if (may_reclaim(member)) shm::reclaim_lines(input(member), block);
      input(member) += block;
    }
  }
}

}  // namespace muster::collective::region
