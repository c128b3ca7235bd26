/// One member's side of the protocol on a group's segment: `RegionGroup` as the sum of its parts.
///
/// collective/region/: the collectives of a group whose members all share one host region.
/// - `control_lines.h`: publishes this member's calls, looks at the peers' and compares them.
/// - `buffer_placement.h`: where what this member gives stands.
/// - `transfer_plan.h`: who gives and who takes, in which pieces.
/// - `pull_transfer.h`, `share_reduction.h`: the two algorithms, as tasks.
/// - `inline_transfer.h`: small calls on the caller's thread, without a task.
/// - `source_table.h`: what the peers give, and how it is read, reduced and reclaimed.
/// - `call_wait.h`: what the running task waits for.
/// - `call_failure.h`, `quiescence.h`: how a call ends in failure.
///
/// Private to this folder, behind `collective/region_group.h`. Stands on shm/, which has the layout
/// of the segment (`shm/segment_layout.h`), and on a channel for comparing and failing. Test it
/// alone: `ctest -R '^collective\.Region'`. docs/internals/shm.md explains the protocol.
///
/// The calls of a group are numbered from 1 without gaps. In each, a member publishes one control
/// line and looks at the lines of those it reads from. It may run ahead. Data too large for the
/// line or its slot passes through the windows, or is read where it is.
///
/// What has come counts, also after the channel has failed: a member that has published its line
/// fails only if something that it needs of the call is not there. So if one has returned with data
/// of all, all do, whatever that one does to the group next. What it gave stands in the segment as
/// it was, since no call follows; what it gave where it is has been read, since it waited for all
/// readers; and what others give where it is they leave to their readers while those get on
/// (`Quiescence`).
#pragma once

#include <cstdint>
#include <vector>

#include "muster/base/status.h"
#include "muster/base/task.h"
#include "muster/collective/region/inline_transfer.h"
#include "muster/collective/region/member_parts.h"
#include "muster/collective/region/pull_transfer.h"
#include "muster/collective/region/share_reduction.h"
#include "muster/collective/region_group.h"

namespace muster::collective::region {

class RegionMember final : public RegionGroup {
 public:
  RegionMember(shm::HostRegion& region, std::uint64_t segment, transport::Channel& channel,
               const Selection& selection, ArenaOf arena)
      : parts_(region, segment, channel, selection, arena) {}

  Task<Status> run(const Args& args, const transport::Fingerprint& call) override;
  RegionInline& inline_calls() override { return inline_; }
  std::vector<int> awaited() const override { return parts_.wait.awaited(); }
  transport::Fingerprint heard(int member) const override { return parts_.lines.heard(member); }
  /// For tests: see `MemberParts`.
  void count_from(std::uint64_t sequence) { parts_.count_from(sequence); }

 private:
  Task<Status> run_call(const Args& args, const transport::Fingerprint& call, bool published);

  MemberParts parts_;
  InlineTransfer inline_{parts_};
  PullTransfer pull_{parts_};
  ShareReduction shares_{parts_};
};

}  // namespace muster::collective::region
