// What a caller's thread does at once. Small calls without a task: the line is written, the others'
// lines are awaited for a moment, and what they hold is taken. Where somebody is not that quick, or
// something is out of the ordinary, `run` goes on from there; the first moment of its task, a
// larger call's too, belongs to the caller's thread as well (`attend`).
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>

#include "muster/collective/region/region_member.h"
#include "muster/shm/reclaim_lines.h"
#include "muster/transport/core_sharing.h"
#include "muster/wait/spin_wait.h"

namespace muster::collective::region {
namespace {

// How often the lines are looked at with a pause between (some 40 ns each), where every rank of the
// host has a core. Where not, the core is given away between; how long it stays away is for others
// to say, so the clock is asked.
constexpr int kPauses = 500;
constexpr int kPausesForRoom = 8;
/// Of so many givers their next call's slots are sent for.
constexpr int kFewSources = 8;
// So many looks a core is kept for while nobody who shares it is waited for: some microseconds,
// which is less than until it comes back.
constexpr int kMostKept = 100;
constexpr Duration kYielding = std::chrono::microseconds(100);
// So many looks at a larger call for one at the clock.
constexpr int kLooksAClock = 8;

/// Sends for memory that will be written.
void claim(const std::byte* memory, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kCacheLine) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0"
                 :
                 : "m"(memory[at]));  // does nothing where a processor does not know it
#else
    __builtin_prefetch(memory + at, 1);
#endif
  }
}

/// Sends for memory that will be read.
void reach_for(const std::byte* memory, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(memory + at, 0);
}

}  // namespace

/// What is to be touched soon is on its way while this member does other things, once it has
/// published its line. What the others give it, where that is much: they mostly have written it
/// just then too. And what the next call will write, if it is as large as this one: memory that
/// others have read has to be taken back from their caches first, which is as long a way as that of
/// the data itself.
void RegionMember::fetch_ahead(const Flow& flow) const {
  const Line& mine = my_line();
  const bool row = mine.place == Place::slot_row;
  const std::size_t staged =
      row ? std::min<std::size_t>(mine.bytes, kFetchedBytes)
      : mine.place == Place::slot
          ? layout_.table_bytes + std::min<std::size_t>(mine.bytes, kFetchedBytes)
          : 0;
  for (int source = flow.first; staged > 0 && source < flow.last; ++source) {
    if (source == rank_) continue;
    reach_for(reinterpret_cast<const std::byte*>(&line(source, sequence_)), kCacheLine);
    const std::size_t part = row ? mine.bytes / (size() - 1) : 0;  // all give as much, mostly
    reach_for(slot(source) + part * place_in_row(source, rank_),
              std::min(row ? part : staged, kFetchedBytes));
  }
  const bool in_line = mine.place == Place::line || mine.place == Place::line_row;
  claim(reinterpret_cast<const std::byte*>(&line(rank_, sequence_ + 1)),
        offsetof(Line, payload) + (in_line ? mine.bytes : 0));
  claim(base_ + layout_.slot(rank_, sequence_ + 1), staged);
}

/// Who takes, and gives nothing, and finds the givers ahead, sends for what they have given in the
/// next call.
void RegionMember::reach_further(const Flow& flow) const {
  for (int source = flow.first; source < flow.last; ++source) {
    if (source == rank_) continue;
    reach_for(reinterpret_cast<const std::byte*>(&line(source, sequence_ + 1)), sizeof(Line));
    const Line& theirs = line(source, sequence_);
    if (is_staged(theirs.place) && flow.last - flow.first <= kFewSources)
      reach_for(base_ + layout_.slot(source, sequence_ + 1),
                layout_.table_bytes + std::min<std::size_t>(theirs.bytes, kFetchedBytes));
  }
}

/// Whether all that this member gives fits beside its line.
bool RegionMember::is_small(const Args& args) const {
  std::size_t bytes = args.op == Op::broadcast ? args.outputs[0].size() : 0;
  for (const ConstBytes input : args.inputs) bytes += input.size();
  return bytes <= kSlotBytes &&
         (!info(args.op).reduces || info(args.op).lists_input || one_shot(args.op, bytes));
}

/// A moment that a call waits on its caller's core.
class RegionMember::Moment {
 public:
  /// As long as is told above.
  explicit Moment(const RegionMember& member) : my_(member), most_(kPauses) {}
  /// Until then; where every rank has a core its owner looks at the clock.
  Moment(const RegionMember& member, TimePoint end)
      : my_(member), most_(std::numeric_limits<int>::max()), end_(end) {}
  /// Something has come: whoever keeps the core does so for something else.
  void keeps_anew() { kept_ = 0; }
  /// Between two looks. False: it is over. `keeps`: nobody who shares this core is waited for.
  bool pass(int pauses = 1, bool keeps = false) {
    if (my_.failed() || !my_.patient_) return false;
    if (my_.spins_) {
      if (paused_ >= most_) return false;
      if (paused_ == 0 && take_wakeup()) {
        std::this_thread::yield();
        pauses = 1;
      } else {
        for (int i = 0; i < pauses; ++i) pause_once();
      }
      paused_ += pauses;
      return true;
    }
    if (keeps && ++kept_ <= kMostKept) {
      pause_once();
      return true;
    }
    kept_ = 0;
    const TimePoint now = my_.channel_.fabric().clock().now();
    if (end_ == TimePoint()) end_ = now + transport::until_all_came_round(kYielding, my_.per_core_);
    if (now >= end_) return false;
    std::this_thread::yield();
    return true;
  }

 private:
  const RegionMember& my_;
  const int most_;
  int paused_ = 0;
  int kept_ = 0;   // looks since the core was last given away
  TimePoint end_;  // none yet: counts from when the core is given away for the first time
};

/// Who is ahead of the others by the whole ring lets them get on between its looks: each look at
/// their lines keeps them.
bool RegionMember::await_room() {
  for (Moment moment(*this); moment.pass(kPausesForRoom);) {
    if (room_for_line()) return true;
  }
  return false;
}

/// Tells the others on which processor this member runs.
void RegionMember::say_where() {
  const auto core = static_cast<std::uint32_t>(::sched_getcpu() + 1);
  if (core != core_) progress(rank_).core.store(core_ = core, std::memory_order_relaxed);
}

/// Whether a member runs on another processor, as far as is known.
bool RegionMember::is_elsewhere(int member) const {
  const std::uint32_t theirs = progress(member).core.load(std::memory_order_relaxed);
  return core_ != 0 && theirs != 0 && theirs != core_;
}

/// Looks at the lines of all that `flow` takes from, for a moment. Where ranks share cores, and all
/// that is missing comes from another core, the core is kept for a little: the members that share
/// it wait as well, and who gives it away finds the last line a whole round later. Then the others
/// miss its next one, so that a call takes two rounds. `at_once`: whether they were all there
/// already.
bool RegionMember::see_sources(const Flow& flow, bool& at_once) {
  Moment moment(*this);
  int source = flow.first;
  const bool crowded = !spins_ && flow.last - flow.first == group_size();
  for (at_once = true;; at_once = false) {
    while (source < flow.last && (source == rank_ || see(source, sequence_))) ++source;
    if (source >= flow.last)
      return !disagreed_;  // in an earlier call, where this one reads from nobody
    const auto missing = [this](int member) { return member != rank_ && !see(member, sequence_); };
    const bool keeps = crowded && missing_among(source, flow.last, missing, [this](int member) {
                                    return is_elsewhere(member);
                                  }) != Missing::here;
    if (!moment.pass(1, keeps)) return false;
  }
}

/// Whether what `source` gives stands beside its line, with the size that is expected; notes where.
/// Not where it has windows or memory of its own for anybody: it waits to hear that all have done
/// with those, this member too.
bool RegionMember::find_at_once(const Args& args, const Flow& flow, int source) {
  const Line& theirs = line(source, sequence_);
  Source& from = sources_[static_cast<std::size_t>(source)];
  from.place = theirs.place;
  if (from.place == Place::window || in_place(from.place)) return false;
  from.bytes = theirs.bytes;
  if (from.place == Place::line) {
    from.data = theirs.payload;
  } else if (from.place == Place::line_row || from.place == Place::slot_row) {
    from.bytes = taken(args, source).size();
    if (from.bytes * (size() - 1) != theirs.bytes) return false;
    from.data = (from.place == Place::line_row ? theirs.payload : slot(source)) +
                place_in_row(source, rank_) * from.bytes;
  } else if (from.place == Place::slot) {
    const std::byte* const beside = slot(source);
    from.data = beside + layout_.table_bytes;
    if (flow.lists) {
      const Slice& mine = reinterpret_cast<const Slice*>(beside)[rank_];
      from.bytes = mine.bytes;
      from.data = beside + mine.where;
    }
  }
  return from.bytes == taken(args, source).size();
}

bool RegionMember::express(const Args& args, const transport::Fingerprint& call,
                           Meanwhile& meanwhile) {
  waited_ = false;
  if (size() == 1 || failed() || call.sequence != sequence_ + 1 || (call.flags & kRefused) != 0)
    return false;
  const Sketch& sketch = recall_(outline_of(args), [&] {
    return is_small(args) ? Sketch{flow_of(args), true} : Sketch{};
  });
  if (!sketch.small) return false;
  begin_call(call.sequence);
  const bool room = room_for_line();
  if (!room) {
    meanwhile.begun();
    if (!await_room()) {
      --sequence_;
      waited_ = true;
      return false;
    }
  }
  outputs_shared_ = false;
  inputs_lent_ = false;
  read_in_place_ = false;
  copy_words(calls_[sequence_ % kMostSlots], call);
  Flow flow = sketch.flow;
  place(args, flow);
  publish(call);
  published_ = true;
  if (spins_) {
    fetch_ahead(flow);
  } else {
    say_where();
  }
  if (room) meanwhile.begun();
  if (!see_sources(flow, meanwhile.at_once)) {
    waited_ = true;
    return false;
  }
  if (meanwhile.at_once && !flow.gives) reach_further(flow);
  meanwhile.at_once = meanwhile.at_once && room;
  for (int source = flow.first; source < flow.last; ++source) {
    if ((source != rank_ || flow.scaled) && !find_at_once(args, flow, source)) return false;
  }
  take_at_once(args, flow);
  published_ = false;
  if (size() == 2 && flow.gives && flow.last > 0 && !flow.scaled)
    shm::hand_back(line(1 - rank_, sequence_).payload, 1);  // its line, if only its first half
  return true;
}

bool RegionMember::attend(Task<Status>& task, TimePoint deadline) {
  if (std::exchange(waited_, false) && !spins_) return false;
  if (!spins_) say_where();
  const Clock& clock = channel_.fabric().clock();
  const TimePoint end = std::min(
      deadline, clock.now() + (spins_ ? transport::kRoundTrip
                                      : transport::until_all_came_round(kYielding, per_core_)));
  const auto behind = [this](int member) { return is_behind(member); };
  const auto elsewhere = [this](int member) { return is_elsewhere(member); };
  Moment moment(*this, end);
  std::size_t turns = 0;
  int idle = 0;  // looks since nobody is missing: the first finds what came meanwhile, else it is
                 // not the members that are waited for
  for (int looks = 1; !task.step(); ++looks) {
    const bool got_on = task.turns() != std::exchange(turns, task.turns());
    if ((got_on || looks % kLooksAClock == 0) && clock.now() >= end) return false;
    if (got_on) moment.keeps_anew();
    const Missing missing =
        spins_ ? Missing::elsewhere : missing_among(0, group_size(), behind, elsewhere);
    idle = missing == Missing::nobody ? idle + 1 : 0;
    if (!moment.pass(1, missing == Missing::elsewhere || idle == 1)) return false;
  }
  return true;
}

/// Takes what all sources give, which has been found.
void RegionMember::take_at_once(const Args& args, const Flow& flow) {
  if (flow.combines) {
    for (int source = flow.first; source < flow.last; ++source) {
      const auto index = static_cast<std::size_t>(source);
      inputs_[index] =
          source != rank_ || flow.scaled ? sources_[index].data : given(args, flow, rank_).data();
    }
    if (flow.takes > 0)
      reduce_inputs(args, flow.hands_back, args.outputs[0].data(), args.outputs[0].size());
    return;
  }
  copy_own(args, flow);
  for (int source = flow.first; source < flow.last; ++source) {
    const Source& from = sources_[static_cast<std::size_t>(source)];
    if (source == rank_ || from.bytes == 0) continue;
    if (flow.hands_back && is_staged(from.place)) {
      shm::copy_and_hand_back(taken(args, source).data(), from.data, from.bytes);
    } else {
      std::memcpy(taken(args, source).data(), from.data, from.bytes);
    }
  }
}

}  // namespace muster::collective::region
