// SPDX-License-Identifier: BSD-3-Clause
#include "backends/ucc/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <random>
#include <span>
#include <string>
#include <utility>

#include "backends/carried/communicator.h"
#include "backends/carried/fingerprint_exchange.h"
#include "backends/ucc/library.h"
#include "backends/ucc/team.h"
#include "core/collective/communicator.h"

namespace muster::ucc {
namespace {

/// UCC's messages carry the sender, not the receiver: in a process of several members they would go
/// to the wrong one.
Status check_processes(const collective::GroupContext& group, TimePoint deadline) {
  struct ProcessCard {
    std::uint64_t program;  // ranks of several hosts may have the same pid
    std::int64_t pid;
    bool operator==(const ProcessCard&) const = default;
  };
  static const std::uint64_t program =
      std::uint64_t{std::random_device()()} << 32 | std::random_device()();
  const auto all =
      carried::exchange_over_channel(group, ProcessCard{program, ::getpid()}, deadline);
  if (!all) return all.status();
  for (auto card = all->begin(); card != all->end(); ++card)
    if (std::find(all->begin(), card, *card) != card)
      return Status(Code::unsupported,
                    "two of the " + std::to_string(group.size()) +
                        " ranks are threads of one process, which UCC cannot tell apart; start a "
                        "process for each rank, or use backend native");
  return {};
}

}  // namespace

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
  const auto refused = [&](const Status& why) {
    group.channel->fail(why);
    return why.with_context("making group '" + options.name + "' on UCC");
  };
  if (Status apart = check_processes(group, deadline); !apart) return refused(apart);
  auto team = Team::make(**library, group, deadline);
  if (!team) return refused(team.status());
  // UCC takes calls that differ for equal ones, and ends them with wrong data.
  return carried::communicator_over({.library = *library, .name = "UCC", .compares_calls = true},
                                    std::move(group), std::move(*team));
}

}  // namespace muster::ucc
