// SPDX-License-Identifier: BSD-3-Clause
#include "backends/mpi/communicator.h"

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backends/carried/call.h"
#include "backends/carried/communicator.h"
#include "backends/carried/fingerprint_exchange.h"
#include "backends/mpi/loader.h"
#include "core/collective/communicator.h"
#include "core/collective/group_context.h"

namespace muster::mpi {
namespace {

using collective::GroupContext;

/// Each member's rank in MPI_COMM_WORLD, exchanged over the group's channel.
Result<std::vector<int>> world_ranks(const GroupContext& group, const MpiWorld& world,
                                     TimePoint deadline) {
  struct Card {
    std::int32_t rank, size;
  };
  const auto all = carried::exchange_over_channel(group, Card{world.rank, world.size}, deadline);
  if (!all) return all.status();
  std::vector<int> ranks;
  for (const Card& card : *all) {
    const bool twice = std::find(ranks.begin(), ranks.end(), card.rank) != ranks.end();
    if (card.size == world.size && !twice) {
      ranks.push_back(card.rank);
      continue;
    }
    return Status(Code::unsupported,
                  "the " + std::to_string(group.size()) +
                      " ranks are not processes of one MPI job: MPI_COMM_WORLD has " +
                      std::to_string(world.size) + (world.size == 1 ? " process" : " processes") +
                      " here; start the program with this MPI's mpirun (" +
                      world.library->version() + " in " + library_path() +
                      "), or set MUSTER_MPI_LIBRARY to the MPI whose mpirun you use");
  }
  return ranks;
}

}  // namespace

Result<std::shared_ptr<collective::Communicator>> create(
    std::shared_ptr<transport::Fabric> fabric, std::vector<int> members,
    const collective::CommunicatorOptions& options) {
  const std::string what = "making group '" + options.name + "' on MPI";
  const TimePoint deadline = deadline_after(fabric->clock(), options.timeout);
  auto world = start();
  if (!world) return world.status();
  auto channel = collective::create_channel(fabric, std::move(members), options);
  if (!channel) return channel.status();
  GroupContext group{std::move(fabric), std::move(*channel), options.name, options.peer_traces};
  auto ranks = world_ranks(group, *world, deadline);
  if (!ranks) {
    group.channel->fail(ranks.status());
    return ranks.status().with_context(what);
  }
  constexpr int kTags = 32768;  // limit: what MPI guarantees
  Comm* made = nullptr;
  const int tag = static_cast<int>(group.channel->id() % kTags);
  if (const int code = world->library->create(*ranks, tag, made); code != 0) {
    Status why = carried::failed(*world->library, "MPI_Comm_create_group", code).with_context(what);
    group.channel->fail(why);
    return why;
  }
  return carried::communicator_over(
      {.library = world->library, .last_tag = world->last_tag, .on_abandoned = &leave_unfinalized},
      std::move(group), std::unique_ptr<Comm>(made));
}

}  // namespace muster::mpi
