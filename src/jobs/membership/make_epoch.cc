// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <map>

#include "jobs/membership/next_epoch.h"

namespace muster::membership {
namespace {

/// A member's report of an epoch that failed has no part in the next: with many members it would
/// be more than a service takes.
std::string value_of(NodeReport report) {
  report.troubled_in = report.committed = report.ending_in = report.lost_in = 0;
  report.blamed.clear();
  report.trouble.clear();
  return encode(report);
}

}  // namespace

Epoch make_epoch(const JobView& view, const Decision& decision) {
  Epoch epoch{view.epoch().number + 1, decision.state,  decision.restarts,
              decision.exit_code,      decision.reason, {},
              view.epoch().launch};
  if (decision.state != JobState::running) return epoch;
  std::map<int, Member> members;
  const auto add = [&](int slot, const std::string& name, std::int64_t joined) {
    members.emplace(slot, Member{slot, name, value_of(view.nodes().at(name).report), joined});
  };
  for (const auto& [slot, seat] : view.seats()) {
    const bool left_out = std::ranges::count(decision.left_out, slot) > 0;
    if (seat.present && !left_out) add(slot, seat.name, seat.joined);
  }
  for (const auto& [slot, name] : decision.seated) add(slot, name, epoch.number);
  for (auto& [slot, member] : members) epoch.members.push_back(std::move(member));
  view.record_past(epoch, decision.at, decision.troubles_since);
  return epoch;
}

}  // namespace muster::membership
