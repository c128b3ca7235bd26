/// How the members of a new group agree on the id of its channel, over a channel that all ranks of
/// the job share and that outlives deaths.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "muster/base/clock.h"
#include "muster/base/status.h"
#include "muster/collective/selection.h"
#include "muster/transport/channel.h"
#include "muster/transport/fabric.h"

namespace muster::collective {

/// After the deadline the others give the first member so long to tell who is missing.
inline constexpr Duration kVerdictGrace =
    std::chrono::milliseconds(50);  // limit: patience of a failure

/// What the first member hands to all. Goes over the wire as it is.
struct GroupDescriptor {
  std::uint64_t segment = 0;  ///< of the host's region
  Selection::Bounds bounds{};
};

struct Agreement {
  std::shared_ptr<transport::Channel> channel;
  GroupDescriptor descriptor;
};

/// Every member calls it with the same members, name and `use` (how many groups of these members
/// and this name it has made before). Blocks. All tell the first member that they are there; once
/// it has heard of everybody it gives the channel one of its own ids, which nobody else gives out,
/// and tells all: one note from each and one to each. `describe_group` is called on the first
/// member once all have come; where it fails, the making does, on all. At the deadline the missing
/// members are named, and the first member tells those that came. A member's death ends it on all
/// others with that death. `release` is called with what `describe_group` gave where no other
/// member has got it and none will; where some have got it, the channel fails with the cause, on
/// them too. `give_up` (may be empty) is asked now and then while it waits; the failure that it
/// gives ends the agreement. Nobody else is disturbed.
Result<Agreement> agree(transport::Fabric& fabric, const std::vector<int>& members,
                        const std::string& name, std::uint64_t use, TimePoint deadline,
                        const std::function<Result<GroupDescriptor>()>& describe_group,
                        const std::function<void(const GroupDescriptor&)>& release = {},
                        const std::function<Status()>& give_up = {});

}  // namespace muster::collective
