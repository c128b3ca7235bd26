// SPDX-License-Identifier: BSD-3-Clause
/// The parts of a call that run on the caller's thread: a small call as a whole, without a task
/// (`try_inline`), and the start of a larger one (`drive_until`).
///
/// A small call writes its line, polls for the peers' lines and copies their data. If a peer is
/// late, or anything unusual happens, `RegionMember::run` continues from there.
#pragma once

#include "core/base/time/task.h"
#include "core/collective/call.h"
#include "core/collective/communicator.h"
#include "core/collective/region/member_parts.h"
#include "core/collective/region_group.h"
#include "core/shm/group_peers.h"
#include "core/transport/channel/fingerprint.h"
#include "muster/clock.h"

namespace muster::collective::region {

class InlineTransfer final : public RegionInline {
 public:
  explicit InlineTransfer(MemberParts& parts) : parts_(parts), cores_(parts.segment) {}

  bool try_inline(const Args& args, StartingCall& starting) override;
  bool may_block() const override { return parts_.may_block; }
  bool drive_until(Task<Status>& task, TimePoint deadline) override;
  /// Whether `try_inline` has published the current call and left the rest to a task.
  bool is_published() const { return published_; }
  /// The task has taken over.
  void on_task_started() { published_ = false; }

 private:
  struct CachedPlan {
    TransferPlan transfer;
    bool is_small = false;  // this member's whole input fits into its line or slot
  };

  bool is_small(const Args& args) const;
  bool await_room();
  bool poll_sources(const TransferPlan& plan, bool& no_wait);
  bool await_sources(const TransferPlan& plan, int source);
  /// Polls the lines of the sources from `source` on, up to the first missing one.
  bool poll_from(const TransferPlan& plan, int& source) {
    while (source < plan.last && (source == parts_.segment.rank() || parts_.lines.poll(source)))
      ++source;
    return source >= plan.last;
  }
  bool read_staged(const Args& args, const TransferPlan& plan);
  void prefetch_this_and_next(const TransferPlan& plan) const;
  void prefetch_next_of(const TransferPlan& plan) const;
  bool may_wait() const { return !parts_.channel.failed() && parts_.may_block; }

  // Used under the communicator's drive lock, like all of this folder's classes.
  MemberParts& parts_;
  shm::CorePlacement cores_;
  CallCache<CachedPlan> plans_;
  bool published_ = false;  // from the publication of a line until the call ends or a task begins
  bool wait_timed_out_ = false;  // the last wait, for lines or for room, timed out
};

}  // namespace muster::collective::region
