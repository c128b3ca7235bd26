#include "muster/backends/ucc/communicator.h"

#include <string>
#include <utility>

#include "muster/backends/mpi/communicator.h"
#include "muster/backends/ucc/library.h"
#include "muster/backends/ucc/team.h"
#include "muster/collective/group_channel.h"

namespace muster::ucc {

Result<std::shared_ptr<collective::Communicator>> create(
    std::shared_ptr<transport::Fabric> fabric, std::vector<int> members,
    const collective::CommunicatorOptions& options) {
  const TimePoint deadline = deadline_after(fabric->clock(), options.timeout);
  const auto& library = UccLibrary::of_process();
  if (!library) return library.status();
  auto channel = collective::create_channel(fabric, std::move(members), options);
  if (!channel) return channel.status();
  collective::GroupContext group{std::move(fabric), std::move(*channel), options.name,
                                 options.peer_traces};
  auto team = Team::make(**library, group, deadline);
  if (!team) {
    group.channel->fail(team.status());
    return team.status().with_context("making group '" + options.name + "' on UCC");
  }
  // UCC takes calls that differ for equal ones, and ends them with wrong data.
  return mpi::carried_by({.library = *library, .name = "UCC", .compares_calls = true},
                         std::move(group), std::move(*team));
}

}  // namespace muster::ucc
