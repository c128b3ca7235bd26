/// The collectives of a group whose members all share one host region: one control line and a ring
/// of staging slots per member; buffers in the arena are used where they are. Used by
/// `Communicator` alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "muster/base/clock.h"
#include "muster/base/status.h"
#include "muster/base/task.h"
#include "muster/collective/communicator.h"
#include "muster/collective/selection.h"
#include "muster/shm/host_region.h"
#include "muster/transport/channel.h"
#include "muster/transport/fingerprint.h"

namespace muster::collective {

struct StartingCall;  // starting_call.h

/// What a caller's thread does by itself, of the calls of one group.
class RegionInline {
 public:
  /// The whole of a small call, without a task: true if it has ended, with success. Else
  /// `RegionGroup::run` must follow with the same call, before any other, and goes on from where
  /// this stopped. Waits for the others no longer than `drive_until`. `call.on_started` once it has
  /// published the call, or before it waits for room to do so. A call that is too large is not
  /// begun.
  virtual bool try_inline(const Args& args, StartingCall& call) = 0;
  /// Whether the caller's thread may wait for the others: they are not its own fibers.
  virtual bool may_block() const = 0;
  /// Goes on with a task of `run`, while the thread does nothing else, until it has ended (true) or
  /// the time for that is used up: 50 us if every rank has a core, else 0.1 ms for each rank that
  /// shares one, up to 0.8 ms; none if `try_inline` has waited for the others in vain on a shared
  /// core. Looks at `deadline` whenever the task has got on. `step()` goes on with what is left.
  virtual bool drive_until(Task<Status>& task, TimePoint deadline) = 0;

 protected:
  ~RegionInline() = default;
};

class RegionGroup {
 public:
  /// Bytes that a group of `members` takes of the region.
  static std::size_t segment_bytes(int members);

  /// `segment` was claimed by one member, is zeroed, and its offset is the same on all; `channel`'s
  /// members are all in `region`. `selection` is the same on all too. Local: waits for nobody.
  static std::unique_ptr<RegionGroup> attach(shm::HostRegion& region, std::uint64_t segment,
                                             transport::Channel& channel,
                                             const Selection& selection);
  virtual ~RegionGroup() = default;

  /// One collective (any op of info() but send and recv), resumable; nothing inside blocks. `args`
  /// and `call` must outlive the task; `call.sequence` numbers the group's calls without gaps.
  /// Publishes `call`, compares it with every other member's (`Channel::compare`), and ends with
  /// the channel's failure if the channel has failed (asked in every wait). A member that returns
  /// success may overwrite its buffers at once, arena or not. Wakes the mailboxes of members it has
  /// published something for.
  virtual Task<Status> run(const Args& args, const transport::Fingerprint& call) = 0;
  /// What a caller's thread does by itself. Good as long as the group.
  virtual RegionInline& inline_calls() = 0;
  /// Job ranks whose line the running task waits for: for deadline errors.
  virtual std::vector<int> awaited() const = 0;
  /// The latest call of the member at a position of the group that this member has looked at;
  /// sequence 0 if it has seen none.
  virtual transport::Fingerprint heard(int member) const = 0;
};

}  // namespace muster::collective
