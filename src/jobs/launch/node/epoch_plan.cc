// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/node/epoch_plan.h"

#include <algorithm>
#include <utility>

#include "jobs/membership/job_view.h"

namespace muster::launch {
namespace {

std::string incarnation_of(const membership::Member& member) {
  const auto report = membership::decode_report(member.value);
  return report ? report->incarnation : std::string();
}

}  // namespace

Result<EpochPlan> plan_of(const membership::Epoch& epoch, const OwnPlace& own) {
  EpochPlan plan;
  plan.epoch = epoch;
  for (const membership::Member& member : epoch.members) {
    const auto report = membership::decode_report(member.value);
    auto details = report ? decode_node_details(report->details) : report.status();
    if (!details) return details.status();
    const bool is_own = report->incarnation.empty() ? member.name == own.name
                                                    : report->incarnation == own.incarnation;
    if (is_own) {
      if (details->facts.workers != own.workers)
        return Status(Code::mismatch, "epoch " + std::to_string(epoch.number) + " of the job has " +
                                          std::to_string(details->facts.workers) +
                                          " workers on this node, which starts " +
                                          std::to_string(own.workers));
      plan.node = static_cast<int>(plan.nodes.size());
      plan.slot = member.slot;
      plan.joined = member.joined;
    }
    plan.nodes.push_back(std::move(*details));
  }
  plan.joined_later = plan.node >= 0 && std::ranges::any_of(epoch.members, [&](const auto& other) {
                        return other.joined < plan.joined;
                      });
  return plan;
}

bool has_member(const membership::Epoch& epoch, const std::string& incarnation) {
  return std::ranges::any_of(epoch.members, [&](const membership::Member& member) {
    return incarnation_of(member) == incarnation;
  });
}

bool only_adds_nodes(const membership::Epoch& epoch, const membership::Epoch& next) {
  const auto stays = [&](const membership::Member& before) {
    return std::ranges::any_of(next.members, [&](const membership::Member& now) {
      return now.slot == before.slot && incarnation_of(now) == incarnation_of(before);
    });
  };
  return next.restarts == epoch.restarts && next.members.size() > epoch.members.size() &&
         std::ranges::all_of(epoch.members, stays);
}

std::vector<int> slots_of(const EpochPlan& plan, const std::vector<int>& ranks) {
  std::vector<NodeFacts> facts;
  for (const NodeDetails& node : plan.nodes) facts.push_back(node.facts);
  std::vector<int> slots;
  for (const int rank : ranks) {
    const int node = node_of_rank(facts, rank);
    if (node >= 0) slots.push_back(plan.epoch.members[static_cast<std::size_t>(node)].slot);
  }
  return slots;
}

}  // namespace muster::launch
