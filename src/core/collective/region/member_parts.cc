// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/region/member_parts.h"

#include <vector>

#include "core/collective/region/call_failure.h"
#include "core/shm/process_end.h"
#include "core/transport/fabric.h"

namespace muster::collective::region {

bool CallWait::is_behind(int member) const {
  if (member == segment_.rank()) return false;
  switch (target_.what) {
    case WaitTarget::nothing: return false;
    case WaitTarget::room: return lines_.lacks_room_from(member);
    case WaitTarget::lines: return !segment_.has_begun(member);
    case WaitTarget::counter:
      return !shm::reached(segment_.counter(member, target_.counter), target_.until);
  }
  return false;
}

std::vector<int> CallWait::awaited() const {
  std::vector<int> late;    // have not begun this call
  std::vector<int> waited;  // are behind what this task needs
  for (int member = 0; member < segment_.size(); ++member) {
    if ((target_.only >= 0 && target_.only != member) || !is_behind(member)) continue;
    waited.push_back(job_rank(channel_, member));
    if (!segment_.has_begun(member)) late.push_back(waited.back());
  }
  return late.empty() ? waited : late;
}

bool YieldMeter::due(std::size_t bytes) {
  moved_ += bytes;
  if (moved_ < tunables().work_quantum) return false;
  moved_ = 0;
  peers_.wake_self();  // no peer would
  return true;
}

MemberParts::MemberParts(shm::HostRegion& region, std::uint64_t segment_offset,
                         transport::Channel& group_channel, const Selection& selected,
                         ArenaOf arena)
    : channel(group_channel),
      selection(selected),
      topology(region.ranks().size(), channel.fabric().cores()),
      may_block(channel.fabric().threads()),
      segment(region.at(segment_offset), channel.size(), channel.rank()),
      peers(region, channel.members(), channel.rank()),
      direct_reads(segment, peers),
      lines(segment, peers, channel),
      wait(segment, lines, channel),
      failure(segment, peers, channel),
      quiescence(segment, peers, channel, arena),
      sources(segment, peers, failure),
      planner(topology, segment.layout(), channel.rank()),
      placement(segment, direct_reads, windows, quiescence, planner, arena),
      meter(peers) {}

void MemberParts::begin_call(std::uint64_t sequence) {
  segment.set_sequence(sequence);
  quiescence.begin_call();
  sources.begin_call();
  if (sequence % shm::kRefreshEvery == 0) [[unlikely]]
    refresh();
}

// This member's counters have passed all earlier calls. A window last used more than one ring of
// lines ago is free, because all members have finished with that call.
void MemberParts::refresh() {
  const shm::Position now = segment.at_step(0);
  for (const shm::Counter each :
       {shm::Counter::filled, shm::Counter::reduced, shm::Counter::drained})
    segment.advance(each, now);
  const shm::Position age = shm::position(segment.layout().slots + 1, 0);
  windows.release_older(now, age);
  results.release_older(now, age);
}

bool MemberParts::leave() {
  std::vector<int> ended;
  for (int member = 0; member < segment.size(); ++member) {
    const int rank = channel.members()[static_cast<std::size_t>(member)];
    // A peer that is only silent may be stopped in the middle of a store.
    if (member == segment.rank() || channel.fabric().gone(rank).ok()) continue;
    if (const auto process = peers.process_of(member); process != nullptr && process->seen())
      ended.push_back(member);
  }
  return segment.leave(ended);
}

void MemberParts::count_from(std::uint64_t sequence) {
  segment.set_sequence(sequence);
  lines.count_from(sequence);
}

}  // namespace muster::collective::region
