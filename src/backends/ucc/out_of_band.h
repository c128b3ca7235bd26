/// The allgather by which UCC makes a team: messages of a group's channel.
#pragma once

#include <optional>
#include <vector>

#include "backends/ucc/api.h"
#include "core/collective/group_context.h"

namespace muster::ucc {

/// UCC's team uses it until the team has been destroyed. Not thread-safe: UCC calls it under the
/// library's lock. Never blocks.
class OutOfBand {
 public:
  explicit OutOfBand(collective::GroupContext group) : group_(std::move(group)) {}
  OutOfBand(const OutOfBand&) = delete;

  UccOob functions();
  /// Lets go of the group, for a team that UCC keeps: what it asks for from here on fails.
  void leave() { group_.reset(); }
  /// Job ranks of the members that have not come to the exchange that is under way.
  const std::vector<int>& missing() const { return missing_; }

 private:
  struct MemberExchange;
  UccStatus test(MemberExchange& exchange);

  std::optional<collective::GroupContext> group_;
  std::vector<int> missing_;
};

}  // namespace muster::ucc
