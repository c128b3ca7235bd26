// SPDX-License-Identifier: BSD-3-Clause
/// One member's side of the protocol on a group's segment: composes `RegionGroup` from its parts.
///
/// collective/region/: the collectives of a group whose members all share one host region.
/// - `control_lines.h`: publishes this member's calls, polls the peers' and compares them.
/// - `transfer_plan.h`: which members send and receive, in which chunks.
/// - `pull_transfer.h`, `share_reduction.h`: the two algorithms, as tasks.
/// - `inline_transfer.h`: small calls on the caller's thread, without a task.
/// - `source_table.h`: where this member's input is placed, and how the peers' inputs are read,
///   reduced and reclaimed.
/// - `member_parts.h`: what the running task waits for, and what the algorithms share.
/// - `call_failure.h`: how a call fails.
///
/// Private to this folder, behind `core/collective/region_group.h`. Depends on shm/, which defines
/// the layout of the segment (`core/shm/segment_layout.h`), and on a channel to compare calls and
/// to fail. Tests: `ctest -R '^collective\.Region'`. docs/internals/shm.md explains the protocol.
///
/// The calls of a group are numbered from 1 without gaps. In each call a member publishes one
/// control line and polls the lines of the members that it reads from. It may run ahead. Data too
/// large for the line or its slot passes through the windows or is read in place.
///
/// Data that has arrived counts even after the channel has failed: a member that has published its
/// line fails only if data that it needs is missing. So if one member returns with everyone's data,
/// all do, whatever that member does to the group next. Its staged input stays in the segment,
/// since no call follows; its input read in place has been read, since it waited for all readers;
/// and senders leave memory that is read in place to the readers as long as those make progress
/// (`Quiescence`).
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/process/fork_guard.h"
#include "core/base/time/task.h"
#include "core/collective/region/inline_transfer.h"
#include "core/collective/region/member_parts.h"
#include "core/collective/region/pull_transfer.h"
#include "core/collective/region/share_reduction.h"
#include "core/collective/region_group.h"
#include "core/shm/host_region.h"
#include "muster/status.h"

namespace muster::collective::region {

class RegionMember final : public RegionGroup {
 public:
  RegionMember(shm::HostRegion& region, std::uint64_t segment, transport::Channel& channel,
               const Selection& selection, ArenaOf arena)
      : region_(region), offset_(segment), parts_(region, segment, channel, selection, arena) {}
  /// Leaves the segment. The last member frees it.
  ~RegionMember() override;

  Task<Status> run(const Args& args, const transport::Fingerprint& call) override;
  RegionInline& inline_calls() override { return inline_; }
  std::vector<int> awaited() const override { return parts_.wait.awaited(); }
  transport::Fingerprint heard(int member) const override { return parts_.lines.heard(member); }
  /// For tests: see `MemberParts`.
  void count_from(std::uint64_t sequence) { parts_.count_from(sequence); }

 private:
  Task<Status> run_call(const Args& args, const transport::Fingerprint& call, bool published);

  shm::HostRegion& region_;
  const std::uint64_t offset_;
  const ProcessMark mark_;
  MemberParts parts_;
  InlineTransfer inline_{parts_};
  PullTransfer pull_{parts_};
  ShareReduction shares_{parts_};
};

}  // namespace muster::collective::region
