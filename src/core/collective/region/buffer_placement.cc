#include "core/collective/region/buffer_placement.h"

#include <algorithm>

#include "core/shm/cache_lines.h"

namespace muster::collective::region {
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
