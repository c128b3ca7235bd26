// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/region/inline_transfer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/collective/control.h"
#include "core/shm/cache_lines.h"
#include "core/transport/fabric.h"
#include "core/tunables/tunables.h"
#include "core/wait/spin_wait.h"

namespace muster::collective::region {
namespace {

using shm::BufferLocation;
using shm::Line;
using shm::MissingPeers;

auto clock_of(const MemberParts& parts) {
  return [&clock = parts.channel.fabric().clock()] { return clock.now(); };
}

}  // namespace

/// Called after this member has published its line. Prefetches the peers' slots if this call uses
/// slots, since the peers have probably just written theirs too. Also prefetches for writing the
/// line and slot of the next call, assuming it has the same size: lines in readers' caches must be
/// invalidated first, which takes as long as the copy itself.
void InlineTransfer::prefetch_this_and_next(const TransferPlan& plan) const {
  const shm::GroupSegment& segment = parts_.segment;
  const int rank = segment.rank();
  const std::uint64_t next = segment.sequence() + 1;
  const Line& mine = segment.my_line();
  const bool row = mine.location == BufferLocation::slot_row;
  const std::size_t staged =
      row ? std::min<std::size_t>(mine.bytes, fixed::kInlineCopy)
      : mine.location == BufferLocation::slot
          ? segment.layout().table_bytes + std::min<std::size_t>(mine.bytes, fixed::kInlineCopy)
          : 0;
  if (staged > 0) {
    const std::size_t part = row ? mine.bytes / (segment.layout().members - 1) : 0;
    for (int source = plan.first; source < plan.last; ++source) {
      if (source == rank) continue;
      shm::prefetch_to_read(reinterpret_cast<const std::byte*>(&segment.line(source)),
                            shm::kCacheLine);
      shm::prefetch_to_read(segment.slot(source) + part * shm::place_in_row(source, rank),
                            std::min(row ? part : staged, fixed::kInlineCopy));
    }
  }
  const bool in_line =
      mine.location == BufferLocation::line || mine.location == BufferLocation::line_row;
  shm::prefetch_to_write(reinterpret_cast<const std::byte*>(&segment.line(rank, next)),
                         offsetof(Line, payload) + (in_line ? mine.bytes : 0));
  shm::prefetch_to_write(segment.slot(rank, next), staged);
}

/// A member that only receives, and finds the senders ahead, prefetches their lines and slots of
/// the next call.
void InlineTransfer::prefetch_next_of(const TransferPlan& plan) const {
  const shm::GroupSegment& segment = parts_.segment;
  const std::uint64_t next = segment.sequence() + 1;
  for (int source = plan.first; source < plan.last; ++source) {
    if (source == segment.rank()) continue;
    shm::prefetch_to_read(reinterpret_cast<const std::byte*>(&segment.line(source, next)),
                          sizeof(Line));
    const Line& theirs = segment.line(source);
    if (shm::is_staged(theirs.location) && plan.last - plan.first <= tunables().few_ranks)
      shm::prefetch_to_read(
          segment.slot(source, next),
          segment.layout().table_bytes + std::min<std::size_t>(theirs.bytes, fixed::kInlineCopy));
  }
}

bool InlineTransfer::is_small(const Args& args) const {
  std::size_t bytes = args.op == Op::broadcast ? args.outputs[0].size() : 0;
  for (const ConstBytes input : args.inputs) bytes += input.size();
  return bytes <= fixed::kSlotBytes &&
         (!info(args.op).reduces || info(args.op).lists_input || parts_.one_shot(args.op, bytes));
}

/// A member that is ahead of the others by the whole ring polls less often, because each poll takes
/// the peers' lines from their caches.
bool InlineTransfer::await_room() {
  SpinWait spin(SpinBudget::for_peers(parts_.topology));
  while (may_wait() && spin.pause(clock_of(parts_), fixed::kCheckPauses)) {
    if (parts_.lines.has_room()) return true;
  }
  return false;
}

/// Polls the lines of all members that `plan` reads from until none is missing. `no_wait`: whether
/// all were there at the first poll.
bool InlineTransfer::poll_sources(const TransferPlan& plan, bool& no_wait) {
  int source = plan.first;
  no_wait = poll_from(plan, source);
  if (!no_wait && !await_sources(plan, source)) return false;
  return parts_.lines.agreed();  // an earlier call may have differed, and this one may read nothing
}

/// When oversubscribed, keeps spinning for at most `shared_core_pauses` if every missing peer runs
/// on another core: peers on this core are waiting too, and yielding would cost a full scheduling
/// round.
bool InlineTransfer::await_sources(const TransferPlan& plan, int source) {
  SpinWait spin(SpinBudget::for_peers(parts_.topology));
  const int rank = parts_.segment.rank();
  const bool all_on_shared_cores =
      parts_.topology.oversubscribed() && plan.last - plan.first == parts_.segment.size();
  const auto is_missing = [&](int member) { return member != rank && !parts_.lines.poll(member); };
  const auto is_elsewhere = [&](int member) { return cores_.is_elsewhere(member); };
  do {
    const bool keeps_core =
        all_on_shared_cores &&
        shm::missing_among(source, plan.last, is_missing, is_elsewhere) != MissingPeers::here;
    if (!may_wait() || !spin.pause(clock_of(parts_), 1, keeps_core)) return false;
  } while (!poll_from(plan, source));
  return true;
}

bool InlineTransfer::try_inline(const Args& args, StartingCall& starting) {
  const transport::Fingerprint& call = starting.fingerprint;
  bool& no_wait = starting.record.completed_inline;
  wait_timed_out_ = false;
  shm::GroupSegment& segment = parts_.segment;
  if (segment.size() == 1 || parts_.channel.failed() || call.sequence != segment.sequence() + 1 ||
      (call.flags & kRefused) != 0)
    return false;
  const CachedPlan& cached = plans_(signature_of(args), [&] {
    return is_small(args) ? CachedPlan{parts_.planner.plan(args), true} : CachedPlan{};
  });
  if (!cached.is_small) return false;
  const TransferPlan& plan = cached.transfer;
  parts_.begin_call(call.sequence);
  const bool room = parts_.lines.has_room();
  if (!room) {
    starting.on_started();
    if (!await_room()) {
      segment.set_sequence(call.sequence - 1);
      wait_timed_out_ = true;
      return false;
    }
  }
  parts_.placement.place(args, plan);
  parts_.lines.publish(call);
  published_ = true;
  if (parts_.topology.dedicated()) {
    prefetch_this_and_next(plan);
  } else {
    cores_.publish();
  }
  if (room) starting.on_started();
  if (!poll_sources(plan, no_wait)) {
    wait_timed_out_ = true;
    return false;
  }
  if (no_wait && !plan.sends) prefetch_next_of(plan);
  no_wait = no_wait && room;
  if (!read_staged(args, plan)) return false;
  published_ = false;
  if (segment.size() == 2 && plan.sends && plan.last > 0 && !plan.scaled)
    shm::reclaim_lines(segment.line(1 - segment.rank()).payload,
                       1);  // its line, the first half of it
  return true;
}

/// Copies or reduces the data of all sources. Returns false, with nothing done, if any data is not
/// in a line or slot.
bool InlineTransfer::read_staged(const Args& args, const TransferPlan& plan) {
  const int rank = parts_.segment.rank();
  SourceTable& sources = parts_.sources;
  for (int source = plan.first; source < plan.last; ++source) {
    if ((source != rank || plan.scaled) && !sources.resolve_staged(args, plan, source))
      return false;
  }
  if (plan.combines) {
    for (int source = plan.first; source < plan.last; ++source) {
      sources.input(source) =
          source != rank || plan.scaled ? sources[source].data : input_for(args, plan, rank).data();
    }
    if (plan.read_steps > 0)
      sources.reduce(args, plan.reclaims, args.outputs[0].data(), args.outputs[0].size());
    return true;
  }
  copy_own(args, plan, rank);
  for (int source = plan.first; source < plan.last; ++source) {
    const SourceMemory& from = sources[source];
    if (source == rank || from.bytes == 0) continue;
    std::byte* const to = output_for(args, source).data();
    if (plan.reclaims && shm::is_staged(from.location)) {
      shm::copy_and_reclaim_lines(to, from.data, from.bytes);
    } else {
      std::memcpy(to, from.data, from.bytes);
    }
  }
  return true;
}

bool InlineTransfer::drive_until(Task<Status>& task, TimePoint deadline) {
  const bool shared_core = parts_.topology.oversubscribed();
  if (std::exchange(wait_timed_out_, false) && shared_core) return false;
  if (shared_core) cores_.publish();
  const auto now = clock_of(parts_);
  const SpinBudget budget = SpinBudget::for_started_call(parts_.topology);
  const TimePoint end =
      std::min(deadline, now() + (shared_core ? budget.yield : tunables().round_trip));
  SpinWait spin(budget);
  std::size_t turns = 0;
  // Polls since no member was missing. The first such poll picks up what arrived meanwhile; after
  // that, the wait is not for members.
  int idle = 0;
  for (int polls = 1; !task.step(); ++polls) {
    const bool progressed = task.turns() != std::exchange(turns, task.turns());
    if ((progressed || polls % fixed::kCheckPauses == 0) && now() >= end) return false;
    if (progressed) spin.keep_core_anew();
    const MissingPeers missing =
        shared_core ? shm::missing_among(
                          0, parts_.segment.size(),
                          [&](int member) { return parts_.wait.is_behind(member); },
                          [&](int member) { return cores_.is_elsewhere(member); })
                    : MissingPeers::elsewhere;
    idle = missing == MissingPeers::none ? idle + 1 : 0;
    if (!may_wait() || !spin.pause(now, 1, missing == MissingPeers::elsewhere || idle == 1))
      return false;
  }
  return true;
}

}  // namespace muster::collective::region
