// SPDX-License-Identifier: BSD-3-Clause
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

namespace {

using shm::BufferLocation;
using shm::Line;
using shm::ReaderSlice;

}  // namespace

std::size_t BufferPlacement::place(const Args& args, const TransferPlan& plan) {
  Line& mine = segment_.my_line();
  mine.location = BufferLocation::nothing;
  mine.bytes = 0;
  if (!plan.sends && !(plan.scaled && plan.last > 0)) return 0;
  return plan.per_member ? place_slices(args, plan) : place_input(args, plan);
}

std::size_t BufferPlacement::place_input(const Args& args, const TransferPlan& plan) {
  Line& mine = segment_.my_line();
  const shm::SegmentLayout& layout = segment_.layout();
  const ConstBytes input = input_for(args, plan, 0);
  mine.bytes = input.size();
  mine.first_window = windows_.next();
  if (input.empty()) {
    mine.location = BufferLocation::nothing;
  } else if (input.size() <= fixed::kInlineBytes) {
    mine.location = BufferLocation::line;
    stage(args, plan, mine.payload, input);
  } else if (input.size() <= fixed::kSlotBytes) {
    mine.location = BufferLocation::slot;
    stage(args, plan, segment_.slot(segment_.rank()) + layout.table_bytes, input);
  } else if (const auto offset = arena_offset(input); offset && !plan.scaled) {
    mine.location = BufferLocation::arena;
    mine.input = *offset;
  } else if (plan.single_reader && input.size() >= shm::direct_read_bytes(layout.members) &&
             direct_reads_.all_peers_read() && direct_reads_.readable(input)) {
    mine.location = BufferLocation::memory;
    mine.input = reinterpret_cast<std::uint64_t>(input.data());
  } else {
    mine.location = BufferLocation::window;
    return chunks_in(input.size(), plan.chunk);
  }
  return 0;
}

/// One slice per member. If they all fit, they go into the slot. Otherwise each stays in the arena,
/// stays in this member's memory, or goes into its column of the windows.
std::size_t BufferPlacement::place_slices(const Args& args, const TransferPlan& plan) {
  Line& mine = segment_.my_line();
  const int rank = segment_.rank(), size = segment_.size();
  const shm::SegmentLayout& layout = segment_.layout();
  if (!plan.scaled && args.each <= fixed::kSlotBytes / (layout.members - 1)) {
    place_row(args, plan);
    return 0;
  }
  std::size_t largest = 0;
  mine.bytes = 0;
  mine.first_window = windows_.next();
  for (int reader = 0; reader < size; ++reader) {
    const std::size_t bytes =
        reader != rank || plan.scaled ? input_for(args, plan, reader).size() : 0;
    mine.bytes += bytes;
    largest = std::max(largest, bytes);
  }
  const bool fits = mine.bytes <= fixed::kSlotBytes;
  const bool copies = planner_.copies_from_arena(args.op, mine.bytes);
  // All slices or none: a reader that returns with its own slice then knows that the peers' slices
  // are in the same kind of memory.
  const bool reads_directly =
      plan.single_reader && largest >= shm::direct_read_bytes(layout.members) &&
      direct_reads_.all_peers_read() &&
      std::all_of(args.inputs.begin(), args.inputs.end(),
                  [&](ConstBytes input) { return direct_reads_.readable(input); });
  // The only reader of a slice that is reduced owns its lines until it has finished. That pays off
  // while the lines stay in its caches.
  const bool grants = plan.combines && shm::writes_back_lines() &&
                      mine.bytes * layout.members <= fixed::kReclaimFewBytes;
  mine.location = mine.bytes == 0 ? BufferLocation::nothing
                  : fits          ? BufferLocation::slot
                                  : BufferLocation::window;
  ReaderSlice* const table = segment_.table(rank);
  std::uint64_t at = layout.table_bytes;
  std::size_t windows = 0;
  bool granted = false;
  for (int reader = 0; reader < size; ++reader) {
    const ConstBytes input =
        reader != rank || plan.scaled ? input_for(args, plan, reader) : ConstBytes();
    ReaderSlice& slice = table[reader];
    slice = {input.size(), at, fits ? BufferLocation::slot : BufferLocation::window, false, {}};
    if (input.empty()) {
      slice.location = BufferLocation::nothing;
    } else if (fits) {
      stage(args, plan, segment_.slot(rank) + at, input);
      at += input.size();
    } else if (const auto offset = copies ? std::nullopt : arena_offset(input);
               offset && !plan.scaled) {
      slice.location = BufferLocation::arena;
      slice.where = *offset;
      slice.granted = grants && writable_offset(input);
      granted = granted || slice.granted;
    } else if (reads_directly) {
      slice.location = BufferLocation::memory;
      slice.where = reinterpret_cast<std::uint64_t>(input.data());
    } else {
      windows = std::max(windows, chunks_in(input.size(), plan.chunk));
    }
  }
  if (granted) quiescence_.expose_inputs();
  return windows;
}

/// Equally long slices are contiguous, without a table.
void BufferPlacement::place_row(const Args& args, const TransferPlan& plan) {
  Line& mine = segment_.my_line();
  const int rank = segment_.rank();
  mine.bytes = args.each * (segment_.layout().members - 1);
  mine.location = mine.bytes == 0                     ? BufferLocation::nothing
                  : mine.bytes <= fixed::kInlineBytes ? BufferLocation::line_row
                                                      : BufferLocation::slot_row;
  std::byte* to = mine.location == BufferLocation::line_row ? mine.payload : segment_.slot(rank);
  for (int reader = 0; reader < segment_.size(); ++reader) {
    if (reader == rank) continue;
    stage(args, plan, to, input_for(args, plan, reader));
    to += args.each;
  }
}

bool BufferPlacement::has_in_place_readers(const TransferPlan& plan) const {
  const Line& mine = segment_.my_line();
  if (!plan.sends || shm::in_place(mine.location)) return plan.sends;
  if (!plan.per_member || mine.location != BufferLocation::window) return false;
  const ReaderSlice* const table = segment_.table(segment_.rank());
  return std::any_of(table, table + segment_.size(),
                     [](const ReaderSlice& slice) { return shm::in_place(slice.location); });
}

std::optional<std::uint64_t> BufferPlacement::arena_offset(ConstBytes memory) const {
  const shm::Arena* arena = memory.empty() ? nullptr : arena_();
  return arena == nullptr ? std::nullopt : arena->offset_of(memory.data(), memory.size());
}

std::optional<std::uint64_t> BufferPlacement::writable_offset(ConstBytes memory) const {
  const shm::Arena* arena = memory.empty() ? nullptr : arena_();
  return arena == nullptr || arena->is_read_only() ? std::nullopt
                                                   : arena->offset_of(memory.data(), memory.size());
}

}  // namespace muster::collective::region
