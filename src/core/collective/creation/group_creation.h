// SPDX-License-Identifier: BSD-3-Clause
/// Interface between group creation (`group_creation.cc`) and the group itself (`communicator.cc`).
/// Private to `collective/`.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/collective/communicator.h"
#include "core/collective/creation/link_report.h"
#include "core/collective/queue/progress.h"
#include "core/collective/select/selection.h"
#include "core/transport/channel/channel.h"
#include "core/transport/fabric.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::collective {

// How the members of a new group agree on its channel id, over a channel that all ranks of the job
// share and that survives the death of ranks.

/// After the deadline, the other members wait this much longer for the first member's report of the
/// missing members.
inline constexpr Duration kVerdictGrace =
    std::chrono::milliseconds(50);  // limit: delay of an error

/// Sent by the first member to all others. Also the wire format.
struct GroupDescriptor {
  std::uint64_t segment = 0;  ///< of the host's region
  Selection::Bounds bounds{};
  // As in `GroupPlacement`, from the reports of all members.
  std::uint64_t strands = 1;
  MemberOrder order{};
};

struct Agreement {
  std::shared_ptr<transport::Channel> channel;
  GroupDescriptor descriptor;
};

/// Every member calls it with the same members, name and `use` (how many groups of these members
/// and this name it has created before). Blocks. Every member reports to the first one. Once all
/// have, the first member gives the channel one of its own ids, which no other rank uses, and sends
/// it to all: one note from each member and one to each. `describe_group` runs on the first member
/// after all have reported; if it fails, creation fails on all members. At the deadline the error
/// names the missing members, and the first member tells those that reported. The death of a member
/// ends the agreement on all others with that death as the cause. `links` (may be empty) is asked
/// for each member's report, on the first one when all others have reported, which has opened its
/// links to them; from all reports follow strands and order. `release` is called with the
/// result of `describe_group` if no other member has received it or will; if some have, the channel
/// fails with the cause, also on them. `give_up` (may be empty) is polled during the wait; if it
/// returns a failure, the agreement ends with it. Other ranks are not involved.
Result<Agreement> agree(transport::Fabric& fabric, const std::vector<int>& members,
                        const std::string& name, std::uint64_t use, TimePoint deadline,
                        const std::function<Result<GroupDescriptor>()>& describe_group,
                        const std::function<void(const GroupDescriptor&)>& release = {},
                        const std::function<Status()>& give_up = {},
                        const std::function<LinkReport()>& links = {});

/// Value of a descriptor without a segment: the group runs over links.
inline constexpr std::uint64_t kNoSegment = ~std::uint64_t{0};

/// Placement of a group of these members. `agreed`: by them, of their links.
GroupPlacement placement_of(const transport::Fabric& fabric, std::span<const int> members,
                            const GroupDescriptor& agreed = {});

/// State shared by the communicators of one fabric.
struct FabricState final : transport::Fabric::Companion {
  Progress progress;
  /// When a group was last closed without waiting for all its members (`closing.h`).
  std::atomic<TimePoint> close_missed{TimePoint(Duration::min() / 2)};
  std::mutex lock;  // guards `uses`
  std::map<std::pair<std::vector<int>, std::string>, std::uint64_t> uses;

  /// How many groups of these members and this name have been created before; increments it.
  std::uint64_t next_use(std::vector<int> members, const std::string& name);
};
std::shared_ptr<FabricState> fabric_state_of(transport::Fabric& fabric);

/// Builds the group that its members have agreed on. Local.
std::shared_ptr<Communicator> assemble(std::shared_ptr<transport::Fabric> fabric, Agreement agreed,
                                       std::string name,
                                       std::shared_ptr<const trace::PeerTraces> peer_traces);
std::shared_ptr<transport::Fabric> fabric_of(Communicator& group);

}  // namespace muster::collective
