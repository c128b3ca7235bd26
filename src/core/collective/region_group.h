// SPDX-License-Identifier: BSD-3-Clause
/// The collectives of a group whose members all share one host region: one control line and a ring
/// of staging slots per member; buffers in the arena are used in place. Used only by
/// `Communicator`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/time/task.h"
#include "core/collective/communicator.h"
#include "core/collective/select/selection.h"
#include "core/shm/host_region.h"
#include "core/transport/channel/channel.h"
#include "core/transport/channel/fingerprint.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::collective {

struct StartingCall;  // control.h

/// The parts of calls that run on the caller's thread.
class RegionInline {
 public:
  /// Runs a whole small call without a task. Returns true if it has completed successfully.
  /// Otherwise `RegionGroup::run` must follow with the same call, before any other, and continues
  /// from where this stopped. Waits for peers no longer than `drive_until`. Invokes
  /// `call.on_started` after publishing the call, or before waiting for room to do so. Returns
  /// false for calls that are too large, without starting them.
  virtual bool try_inline(const Args& args, StartingCall& call) = 0;
  /// Whether the caller's thread may block. False in simulations, which run all ranks as fibers of
  /// one thread.
  virtual bool may_block() const = 0;
  /// Runs a task of `run` on this otherwise idle thread. Returns true if it has completed, false
  /// when its time is up: 50 us with dedicated cores; on shared cores 0.1 ms per rank of a core, at
  /// most 0.8 ms, or zero if `try_inline` has already waited in vain. Checks `deadline` after each
  /// step that makes progress. `step()` continues with the rest.
  virtual bool drive_until(Task<Status>& task, TimePoint deadline) = 0;

 protected:
  ~RegionInline() = default;
};

class RegionGroup {
 public:
  /// Bytes that a group of `members` claims from the region.
  static std::size_t segment_bytes(int members);

  /// One member has claimed `segment`, which is zeroed and has the same offset on all members. All
  /// of `channel`'s members are in `region`. `selection` is the same on all members too. Local,
  /// does not wait.
  static std::unique_ptr<RegionGroup> attach(shm::HostRegion& region, std::uint64_t segment,
                                             transport::Channel& channel,
                                             const Selection& selection);
  virtual ~RegionGroup() = default;

  /// Runs one collective (any op but send and recv) as a resumable task that never blocks. `args`
  /// and `call` must outlive the task; `call.sequence` numbers the group's calls without gaps.
  /// Publishes `call`, compares it with every other member's (`Channel::compare`), and ends with
  /// the channel's failure if the channel has failed (checked in every wait). A member that returns
  /// success may overwrite its buffers at once, whether or not they are in the arena. Wakes the
  /// mailboxes of the members for which it has published data.
  virtual Task<Status> run(const Args& args, const transport::Fingerprint& call) = 0;
  /// The inline part of calls. Valid as long as the group.
  virtual RegionInline& inline_calls() = 0;
  /// Job ranks whose lines the running task waits for, for deadline errors.
  virtual std::vector<int> awaited() const = 0;
  /// The latest call of the member at a group position that this member has seen; sequence 0 if
  /// none.
  virtual transport::Fingerprint heard(int member) const = 0;
};

}  // namespace muster::collective
