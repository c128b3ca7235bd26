// Calls whose data only moves towards its readers: each member says where its data stands, each
// reader takes what it needs, chunk by chunk, and reduces it on the way where the operation
// reduces. Small all_reduces too: every member then reduces everything.
//
// How a giver's data travels is the giver's choice, source by source (its size and its memory), so
// nothing has to be agreed. A giver returns as soon as all is staged; only from the arena must it
// wait for its readers.
#include <sys/prctl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "muster/collective/kernels.h"
#include "muster/collective/region/region_member.h"
#include "muster/shm/copy_past_caches.h"
#include "muster/shm/reclaim_lines.h"

namespace muster::collective::region {
namespace {

// Of two ranks: so that all windows together stay in the cache of a core, and several are under
// way.
constexpr std::size_t kRelayedChunk = 128 * 1024, kLeastRelayed = 16 * 1024;

// What all of more than two members together write at most of a call in which several of them hand
// the same lines back: of a broadcast, and of other calls, where few do that.
constexpr std::size_t kMostBroadcast = 4 * 1024 * 1024, kMostOfFew = 16 * 1024 * 1024,
                      kFewMembers = 4;

// What all members together give at most of a call of which they leave copies (`leaves_early`).
constexpr std::size_t kMostLeft = 2 * 1024 * 1024;

// What all members together give of a call whose slices in the arena are handed back.
constexpr std::size_t kMostLent = 16 * 1024 * 1024;

// Nearly always one or none: a division would cost more than all the rest.
std::size_t chunks(std::size_t bytes, std::size_t chunk) {
  if (bytes <= chunk) return bytes == 0 ? 0 : 1;
  return (bytes + chunk - 1) / chunk;
}

void copy(std::byte* to, const std::byte* from, std::size_t bytes, bool far = false) {
  if (bytes == 0 || to == from) return;
  if (far) {
    shm::copy_past_caches(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

/// By all members that take something: each as much as this one.
std::size_t written_together(const Args& args, std::size_t members) {
  std::size_t bytes = 0;
  for (const MutableBytes output : args.outputs) bytes += output.size();
  return args.op == Op::gather ? bytes : bytes * members;
}

}  // namespace

RegionMember::Flow RegionMember::flow_of(const Args& args) const {
  const OpInfo& table = info(args.op);
  const bool from_root = args.op == Op::broadcast || args.op == Op::scatter;
  const bool to_root = args.op == Op::reduce || args.op == Op::gather;
  const bool root = args.root == rank_;
  Flow flow;
  flow.gives = from_root ? root : to_root ? !root : true;
  flow.lists = table.lists_input;
  flow.combines = table.reduces;
  flow.scaled = table.reduces && args.reduce == Reduce::premul_sum;
  flow.reader = to_root ? args.root : -1;
  if (from_root && !root) {
    flow.first = args.root;
    flow.last = args.root + 1;
  } else if (!from_root && (!to_root || root)) {
    flow.last = group_size();
  }
  flow.chunk = flow.lists ? layout_.column_bytes : layout_.window_bytes;
  if (size() == 2 && (from_root || to_root) && !flow.combines)
    flow.chunk = std::min(flow.chunk, relayed_chunk(args, flow));
  for (int source = flow.first; source < flow.last; ++source) {
    if (source == rank_ && !flow.combines) continue;
    flow.takes = std::max(flow.takes, chunks(taken(args, source).size(), flow.chunk));
    if (!table.lists_output) break;  // the same for all
  }
  flow.hands_back = hands_back(args, flow);
  flow.far = !flow.combines && written_together(args, size()) >= shm::kPastCaches;
  return flow;
}

/// Between two, one gives and the other takes: it empties a window while the other fills the next.
/// Several even for what would fit into one, as many as can be filled without waiting. (Several
/// readers that share cores are better served by few windows.)
std::size_t RegionMember::relayed_chunk(const Args& args, const Flow& flow) const {
  const int other = 1 - rank_;
  const std::size_t bytes =
      flow.gives ? given(args, flow, other).size() : taken(args, other).size();
  return std::clamp(align_up(bytes / kWindows, kCacheLine), kLeastRelayed, kRelayedChunk);
}

/// Whether lines that several members read are handed back by each of them, in a call in which all
/// together write so much. Where all ranks of the host share two cores: lines go back and forth
/// between those then, which is quicker than that their owner takes them from both, as long as what
/// they write stays in their caches.
bool RegionMember::several_hand_back(Op op, std::size_t written) const {
  const std::size_t most = op == Op::broadcast     ? kMostBroadcast
                           : size() <= kFewMembers ? kMostOfFew
                                                   : 0;
  return shm::kSeveralHandBack && two_cores_ && shm::hands_back() && written <= most;
}

/// Whether this member hands back what it reads in windows and slots: what is there for it alone,
/// unless it is so little that it was fetched ahead, or what `several_hand_back`.
bool RegionMember::hands_back(const Args& args, const Flow& flow) const {
  if (!shm::hands_back() || flow.scaled) return false;  // a product is for its giver too
  const bool read_by_several = args.op == Op::broadcast || (!flow.lists && flow.reader < 0);
  if (read_by_several && size() > 2 &&
      (flow.combines || !several_hand_back(args.op, written_together(args, size()))))
    return false;
  if (args.op == Op::broadcast) return true;
  std::size_t most = 0;
  for (int source = flow.first; source < flow.last; ++source) {
    if (source != rank_) most = std::max(most, taken(args, source).size());
  }
  return most > kFetchedBytes;
}

/// Whether members leave copies of what they give in a call, though it stands in the arena: where
/// they share cores, waiting until the last reader had its turn takes longer than the copy.
bool RegionMember::leaves_early(Op op, std::size_t given) const {
  return per_core_ > 1 && (op == Op::reduce || op == Op::reduce_scatter || op == Op::all_to_all) &&
         given * size() <= kMostLeft;
}

/// What this member gives `reader`.
ConstBytes RegionMember::given(const Args& args, const Flow& flow, int reader) const {
  if (args.op == Op::broadcast) return args.outputs[0];
  const std::size_t index = flow.lists ? static_cast<std::size_t>(reader) : 0;
  return index < args.inputs.size() ? args.inputs[index] : ConstBytes();
}

void RegionMember::put(const Args& args, const Flow& flow, std::byte* to, ConstBytes from) const {
  // What many read of a large broadcast stands in all caches, which the root would have to take it
  // from: line by line.
  const bool far = flow.far && args.op == Op::broadcast && size() > 2;
  if (!flow.scaled) return copy(to, from.data(), from.size(), far);
  scale(to, from.data(), elements_in(from.size(), args.dtype), args.dtype, args.factor);
}

/// Whether all that is given has one reader each, and there is more than one reader: they copy from
/// where it stands, then, where they can. That saves a copy. Where many read the same it is cheaper
/// from a window, which is in a cache then; and where one core would copy all, through windows both
/// ends do.
bool RegionMember::read_once(const Args& args, const Flow& flow) const {
  return !flow.combines && (flow.lists || (args.op == Op::all_gather && size() == 2));
}

/// Whether everybody else has said that it can copy from my memory.
bool RegionMember::all_can_read() {
  for (int member = 0; member < group_size() && !read_by_all_; ++member) {
    if (member != rank_ && progress(member).reads.load(std::memory_order_acquire) == 0)
      return false;
  }
  return read_by_all_ = true;
}

/// Whether others can copy from this memory of mine: not from every kind, as from what a device's
/// driver has mapped (pinned memory), and from none once the process has closed itself to others.
/// Looks at both ends.
bool RegionMember::readable(ConstBytes memory) {
  if (::prctl(PR_GET_DUMPABLE) != 1) return false;
  const auto reads = [&](const std::byte& at) {
    std::byte byte;
    return region_.read(local_[static_cast<std::size_t>(rank_)],
                        reinterpret_cast<std::uint64_t>(&at), {&byte, 1});
  };
  return memory.empty() || (reads(memory.front()) && reads(memory.back()));
}

/// Decides where the input stands, in my line for this call; puts it there where that is the line
/// or the slot.
void RegionMember::place_input(const Args& args, Flow& flow) {
  Line& mine = my_line();
  const ConstBytes input = given(args, flow, 0);
  mine.bytes = input.size();
  mine.first_window = static_cast<std::uint8_t>(next_window_ % kWindows);
  if (input.empty()) {
    mine.place = Place::nothing;
  } else if (input.size() <= kInlineBytes) {
    mine.place = Place::line;
    put(args, flow, mine.payload, input);
  } else if (input.size() <= kSlotBytes) {
    mine.place = Place::slot;
    put(args, flow, slot(rank_) + layout_.table_bytes, input);
  } else if (const auto offset = arena_offset(input); offset && !flow.scaled) {
    mine.place = Place::arena;
    mine.input = *offset;
  } else if (input.size() >= read_bytes(size()) && read_once(args, flow) && all_can_read() &&
             readable(input)) {
    mine.place = Place::memory;
    mine.input = reinterpret_cast<std::uint64_t>(input.data());
  } else {
    mine.place = Place::window;
    flow.steps = chunks(input.size(), flow.chunk);
  }
}

/// The same where each member gets a slice of its own: in the slot where all of them fit, else each
/// in the arena or in its column of the windows.
void RegionMember::place_slices(const Args& args, Flow& flow) {
  Line& mine = my_line();
  if (!flow.scaled && args.each <= kSlotBytes / (size() - 1)) return place_row(args, flow);
  std::size_t largest = 0;
  mine.bytes = 0;
  mine.first_window = static_cast<std::uint8_t>(next_window_ % kWindows);
  for (int reader = 0; reader < group_size(); ++reader) {
    const std::size_t bytes = reader != rank_ || flow.scaled ? given(args, flow, reader).size() : 0;
    mine.bytes += bytes;
    largest = std::max(largest, bytes);
  }
  const bool fits = mine.bytes <= kSlotBytes, leaves = leaves_early(args.op, mine.bytes);
  // All slices or none: who has returned with its own knows then that everybody else's stand there
  // too.
  const bool stays = largest >= read_bytes(size()) && read_once(args, flow) && all_can_read() &&
                     std::all_of(args.inputs.begin(), args.inputs.end(),
                                 [&](ConstBytes input) { return readable(input); });
  // What one reader reduces is its own until it has said that it is through, lines and all, while
  // they stay in its caches.
  const bool lends = flow.combines && shm::hands_back() && mine.bytes * size() <= kMostLent;
  mine.place = mine.bytes == 0 ? Place::nothing : fits ? Place::slot : Place::window;
  auto* table = reinterpret_cast<Slice*>(slot(rank_));
  std::uint64_t at = layout_.table_bytes;
  for (int reader = 0; reader < group_size(); ++reader) {
    const ConstBytes input =
        reader != rank_ || flow.scaled ? given(args, flow, reader) : ConstBytes();
    Slice& slice = table[reader];
    slice = {input.size(), at, fits ? Place::slot : Place::window, false, {}};
    if (input.empty()) {
      slice.place = Place::nothing;
    } else if (fits) {
      put(args, flow, slot(rank_) + at, input);
      at += input.size();
    } else if (const auto offset = leaves ? std::nullopt : arena_offset(input);
               offset && !flow.scaled) {
      slice.place = Place::arena;
      slice.where = *offset;
      slice.lent = lends && writable_offset(input);
      inputs_lent_ = inputs_lent_ || slice.lent;
    } else if (stays) {
      slice.place = Place::memory;
      slice.where = reinterpret_cast<std::uint64_t>(input.data());
    } else {
      flow.steps = std::max(flow.steps, chunks(input.size(), flow.chunk));
    }
  }
}

/// Where all slices are equally long no table need tell where each stands.
void RegionMember::place_row(const Args& args, const Flow& flow) {
  Line& mine = my_line();
  const std::size_t each = args.each;
  mine.bytes = each * (size() - 1);
  mine.place = mine.bytes == 0              ? Place::nothing
               : mine.bytes <= kInlineBytes ? Place::line_row
                                            : Place::slot_row;
  std::byte* to = mine.place == Place::line_row ? mine.payload : slot(rank_);
  for (int reader = 0; reader < group_size(); ++reader) {
    if (reader == rank_) continue;
    put(args, flow, to, given(args, flow, reader));
    to += each;
  }
}

void RegionMember::fill_window(const Args& args, const Flow& flow, std::size_t step) {
  const std::size_t number = next_window_++;
  std::byte* to = window(rank_, number);
  const auto part = [&](ConstBytes input) {
    const std::size_t at = std::min(step * flow.chunk, input.size());
    return input.subspan(at, std::min(flow.chunk, input.size() - at));
  };
  if (!flow.lists) {
    put(args, flow, to, part(given(args, flow, 0)));
  } else {
    const auto* table = reinterpret_cast<const Slice*>(slot(rank_));
    for (int reader = 0; reader < group_size(); ++reader) {
      if (table[reader].place != Place::window) continue;
      put(args, flow, to + static_cast<std::size_t>(reader) * layout_.column_bytes,
          part(given(args, flow, reader)));
    }
  }
  window_uses_[number % kWindows] = {position(sequence_, step + 1), Counter::drained, flow.reader,
                                     true};
}

/// Whether the chunk of `step` of what `source` gives can be read.
bool RegionMember::available(const Flow& flow, int source, std::size_t step) {
  if (step == 0) return see(source, sequence_);
  const Source& from = sources_[static_cast<std::size_t>(source)];
  if (from.place != Place::window || step * flow.chunk >= from.bytes) return true;
  return reached(counter(source, Counter::filled), position(sequence_, step + 1));
}

/// Whether memory of `source` that I am to read can be read. Its line has been seen.
bool RegionMember::mapped(const Flow& flow, int source) {
  const Line& theirs = line(source, sequence_);
  const bool arena = theirs.place == Place::arena ||
                     (flow.lists && theirs.place == Place::window &&
                      reinterpret_cast<const Slice*>(slot(source))[rank_].place == Place::arena);
  return !arena || arena_ready(source);
}

/// Reads from the line, and table, of a source where its data stands.
Status RegionMember::resolve(const Args& args, const Flow& flow, int member) {
  const Line& theirs = line(member, sequence_);
  Source& source = sources_[static_cast<std::size_t>(member)];
  source = {theirs.place, nullptr, theirs.bytes, 0, theirs.first_window};
  std::uint64_t where = theirs.input;
  std::uint64_t in_slot = layout_.table_bytes;
  if (theirs.place == Place::line_row || theirs.place == Place::slot_row) {
    source.bytes /= size() - 1;
    in_slot = source.bytes * place_in_row(member, rank_);
  } else if (flow.lists && theirs.place != Place::nothing) {
    const Slice slice = reinterpret_cast<const Slice*>(slot(member))[rank_];
    source.place = slice.place;
    source.bytes = slice.bytes;
    source.lent = slice.lent;
    borrows_ = borrows_ || slice.lent;
    source.column = static_cast<std::size_t>(rank_) * layout_.column_bytes;
    where = in_slot = slice.where;
  }
  const std::size_t expected = taken(args, member).size();
  if (source.bytes != expected) {
    return refuse(Status(Code::mismatch,
                         what(args) + ": " + who(member) + " gives " + who(rank_) + " " +
                             std::to_string(source.bytes) + " bytes, which expects " +
                             std::to_string(expected) +
                             " from it; the sizes of inputs and outputs must agree between the two",
                         {channel_.members()[static_cast<std::size_t>(member)],
                          channel_.members()[static_cast<std::size_t>(rank_)]}));
  }
  switch (source.place) {
    case Place::nothing:
    case Place::window: break;
    case Place::line: source.data = theirs.payload; break;
    case Place::slot:
    case Place::slot_row: source.data = slot(member) + in_slot; break;
    case Place::line_row: source.data = theirs.payload + in_slot; break;
    case Place::arena:
      read_in_place_ = true;
      source.data = arena_of(member, where, source.bytes);
      if (source.data == nullptr) return cannot_map(member, source.bytes);
      break;
    case Place::memory:
      read_in_place_ = true;
      source.address = where;
      break;
  }
  return {};
}

const std::byte* RegionMember::chunk_of(const Source& source, const Flow& flow, int member,
                                        std::size_t step) const {
  if (source.place != Place::window) return source.data + step * flow.chunk;
  return window(member, source.first_window + step) + source.column;
}

/// What is taken from a source in `step`. From its process in large pieces: each is a system call.
std::size_t RegionMember::chunk_from(const Source& from, const Flow& flow) {
  return from.place == Place::memory ? std::max(flow.chunk, kReadPiece) : flow.chunk;
}
std::size_t RegionMember::part(const Source& from, const Flow& flow, std::size_t step) {
  const std::size_t chunk = chunk_from(from, flow);
  return std::min(chunk, from.bytes - std::min(from.bytes, step * chunk));
}

/// Takes that, `bytes` of them.
Status RegionMember::take(const Args& args, const Flow& flow, int source, std::size_t step,
                          std::size_t bytes) {
  const Source& from = sources_[static_cast<std::size_t>(source)];
  const std::size_t at = step * chunk_from(from, flow);
  const MutableBytes to = taken(args, source).subspan(at, bytes);
  if (flow.hands_back && is_staged(from.place)) {
    shm::copy_and_hand_back(to.data(), chunk_of(from, flow, source, step), bytes, flow.far);
  } else if (from.place != Place::memory) {
    copy(to.data(), chunk_of(from, flow, source, step), bytes, flow.far);
  } else if (!region_.read(local_[static_cast<std::size_t>(source)], from.address + at, to)) {
    return cannot_read(source, bytes);
  }
  return {};
}

/// Reduces the chunk of `step` of all members into the output. False where somebody has given up,
/// who may have other uses for what it lent.
bool RegionMember::combine(const Args& args, const Flow& flow, std::size_t step) {
  const MutableBytes out = args.outputs[0];
  const std::size_t at = step * flow.chunk;
  const std::size_t bytes = std::min(flow.chunk, out.size() - at);
  for (int member = 0; member < group_size(); ++member) {
    const auto index = static_cast<std::size_t>(member);
    if (member != rank_ || flow.scaled) {
      inputs_[index] = chunk_of(sources_[index], flow, member, step);
    } else {
      inputs_[index] = given(args, flow, rank_).data() + at;
    }
  }
  const std::size_t most = borrows_ ? kBlockBytes : bytes;
  for (std::size_t done = 0; done < bytes; done += most) {
    if (borrows_ && someone_gave_up(sequence_)) return false;
    reduce_inputs(args, flow.hands_back, out.data() + at + done, std::min(most, bytes - done));
  }
  return true;
}

/// Reduces `inputs_` into `bytes` from `to` on, and leaves them behind what was reduced. Those that
/// others have staged for this member alone, or lent it, are handed back, block by block.
void RegionMember::reduce_inputs(const Args& args, bool hands_back, std::byte* to,
                                 std::size_t bytes) {
  const auto comes_back = [&](std::size_t member) {
    const Source& source = sources_[member];
    const bool mine_for_now =
        is_staged(source.place) || (source.place == Place::arena && source.lent);
    return hands_back && member != static_cast<std::size_t>(rank_) && mine_for_now;
  };
  bool any = false;
  for (std::size_t member = 0; member < size(); ++member) any = any || comes_back(member);
  const std::size_t most = any ? shm::kHandedBlock : bytes;
  for (std::size_t done = 0; done < bytes; done += most) {
    const std::size_t block = std::min(most, bytes - done);
    reduce_complete(to + done, inputs_, elements_in(block, args.dtype), args.dtype, args.reduce);
    for (std::size_t member = 0; any && member < size(); ++member) {
      if (comes_back(member)) shm::hand_back(inputs_[member], block);
      inputs_[member] += block;
    }
  }
}

/// What a member gives itself, where nothing is reduced.
void RegionMember::copy_own(const Args& args, const Flow& flow) {
  if (flow.combines || args.op == Op::broadcast || args.op == Op::barrier) return;
  if ((args.op == Op::gather || args.op == Op::scatter) && args.root != rank_) return;
  const ConstBytes mine = given(args, flow, rank_);
  const MutableBytes to = taken(args, rank_);
  copy(to.data(), mine.data(), std::min(mine.size(), to.size()), flow.far);
}

/// Decides where what this member gives stands, in my line for this call.
void RegionMember::place(const Args& args, Flow& flow) {
  Line& mine = my_line();
  mine.place = Place::nothing;
  mine.bytes = 0;
  if (!flow.gives && !(flow.scaled && flow.last > 0)) return;
  if (flow.lists) {
    place_slices(args, flow);
  } else {
    place_input(args, flow);
  }
}

/// Of whom this member takes something in the step that begins. Whose data is there first is taken
/// first; of several each member begins at its own neighbour, so that not all read from one at
/// once.
void RegionMember::line_up(const Flow& flow) {
  left_.clear();
  const int sources = flow.last - flow.first;
  for (int turn = 0; turn < sources; ++turn) {
    const int source = flow.first + (turn + rank_ + 1) % sources;
    if (source != rank_) left_.push_back(source);
  }
}

Task<Status> RegionMember::pull(const Args& args, const transport::Fingerprint& call) {
  Flow flow = flow_of(args);
  const bool begins = !std::exchange(published_, false);
  if (begins) place(args, flow);
  const Line& mine = my_line();
  if (flow.steps > 0) {
    co_await come(until_emptied(sequence_ - 1));
    if (failed()) co_return channel_.failure();
    fill_window(args, flow, 0);
  }
  const bool readers_come_here = [&] {
    if (!flow.gives || in_place(mine.place)) return flow.gives;
    if (!flow.lists || mine.place != Place::window) return false;
    const auto* table = reinterpret_cast<const Slice*>(slot(rank_));
    return std::any_of(table, table + size(),
                       [](const Slice& slice) { return in_place(slice.place); });
  }();
  if (begins) publish(call);
  const bool takes_nothing = flow.last == 0;
  if (!takes_nothing) copy_own(args, flow);
  if (flow.scaled && flow.last > 0) {
    if (Status resolved = resolve(args, flow, rank_); !resolved) co_return resolved;
  }

  bool drains = false;  // somebody waits to hear that I have read
  const std::size_t steps = std::max<std::size_t>({flow.steps, flow.takes, 1});
  for (std::size_t step = 0; step < steps; ++step) {
    if (read_in_place_ && failed() && someone_gave_up(sequence_))
      co_return channel_.failure();  // what is read may be anything
    if (step + 1 < flow.steps) {
      if (!co_await come(until_emptied(sequence_))) co_return channel_.failure();
      fill_window(args, flow, step + 1);
      advance(Counter::filled, position(sequence_, step + 2));
      wake_others();
    }
    if (step > 0 && step >= flow.takes) continue;
    line_up(flow);
    while (!left_.empty()) {
      const auto there = [&](int source) { return available(flow, source, step); };
      wait_ = {step == 0 ? Wait::For::lines : Wait::For::counter, Counter::filled,
               left_.size() == 1 ? left_.front() : -1, position(sequence_, step + 1)};
      if (!co_await come([&] { return std::any_of(left_.begin(), left_.end(), there); }))
        co_return channel_.failure();
      std::size_t later = 0;
      for (std::size_t turn = 0; turn < left_.size(); ++turn) {
        const int source = left_[turn];
        if (!there(source)) {
          left_[later++] = source;
          continue;
        }
        const Source& from = sources_[static_cast<std::size_t>(source)];
        if (step == 0) {
          if (!co_await come([&] { return mapped(flow, source); })) co_return channel_.failure();
          Status resolved = resolve(args, flow, source);
          if (!resolved) co_return co_await refuse_late(std::move(resolved));
          const Place place = line(source, sequence_).place;
          drains = drains || place == Place::window || in_place(place);
          if (from.place == Place::window && from.bytes >= read_bytes(size()) &&
              read_once(args, flow))
            offer_to_read();
        }
        const std::size_t bytes = part(from, flow, step);
        if (flow.combines || bytes == 0) continue;
        Status took = take(args, flow, source, step, bytes);
        if (!took) co_return co_await refuse_late(std::move(took));
        if (pause_due(bytes)) co_await pause();
      }
      left_.resize(later);
    }
    if (flow.combines && flow.last > 0 && step < flow.takes) {
      if (!combine(args, flow, step)) {
        give_up();  // who gave up first waits to hear that I stopped
        co_await until([&] { return failed(); });
        co_return channel_.failure();
      }
      if (pause_due(flow.chunk * size())) co_await pause();
    }
    if (drains) {
      // With the last of what I take: others may have more windows to fill, for somebody else.
      advance(Counter::drained,
              step + 1 < flow.takes ? position(sequence_, step + 1) : end_of(sequence_));
      wake_others();
    }
  }
  // A root that scatters: nobody shall wait for windows while it copies what it keeps.
  if (takes_nothing) copy_own(args, flow);
  if (readers_come_here &&
      !co_await come(until_reached(Counter::drained, end_of(sequence_), flow.reader))) {
    // Who reads here may have all else that it needs, where somebody else gives it that.
    if (flow.last > 0) static_cast<void>(co_await come_to_rest(Counter::drained, flow.reader));
    if (!until_reached(Counter::drained, end_of(sequence_), flow.reader)())
      co_return channel_.failure();
  }
  co_return Status();
}

}  // namespace muster::collective::region
