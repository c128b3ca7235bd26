// SPDX-License-Identifier: BSD-3-Clause
/// How the survivors of a group agree on the set of survivors, while more of them may die.
///
/// Two stages, repeated until both succeed without a death in between:
///   1. Views. A member's view is (attempt, excluded members). It sends its view to every member
///      that it does not exclude, again whenever the view grows: because a member is found dead,
///      or by joining another member's view (the higher attempt, the union of the exclusions).
///      When all members that it still includes have sent exactly its own view, it decides.
///   2. The members decided upon create a group, which succeeds only if all of them have decided
///      the same and are alive. A member that fails in it starts the next attempt with what it
///      knows then. If a member succeeds with a member that dies meanwhile, it continues the same
///      attempts when it shrinks the new group, so both meet again.
/// The first stage has no leader, so any rank may die in it, including rank 0. It costs n * (n - 1)
/// notes per view.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/collective/communicator.h"
#include "core/transport/fabric.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::collective {

/// The first stage on one member, as a state machine without I/O or clock. Members are positions in
/// the group that was shrunk first.
class SurvivorViews {
 public:
  /// `out`: by position, the members excluded from the start.
  SurvivorViews(int self, std::vector<bool> out, std::uint32_t attempt);

  /// A member's message to all that its view includes.
  struct SurvivorView {
    std::uint32_t attempt = 0;
    std::vector<bool> out;
    friend bool operator==(const SurvivorView&, const SurvivorView&) = default;
  };
  const SurvivorView& view() const { return view_; }
  /// Whether the view must be sent (again) to all members that it includes; clears the flag.
  bool take_changed();
  /// Starts the next attempt with the current knowledge.
  void start_over();
  void heard(int member, const SurvivorView& theirs);
  void gone(int member);
  /// Whether every member that the view includes has sent exactly this view.
  bool decided() const;
  /// Whether another member has excluded this one.
  bool excluded() const { return view_.out[static_cast<std::size_t>(self_)]; }
  bool includes(int member) const { return !view_.out[static_cast<std::size_t>(member)]; }
  /// The included members that have not sent this view yet.
  std::vector<int> awaited() const;

 private:
  void grow(const SurvivorView& other);

  const int self_;
  SurvivorView view_;
  bool changed_ = true;
  std::vector<std::optional<SurvivorView>> received_;  // the latest view of each member
};

/// Links a group with those it was shrunk from; part of the key under which survivors meet.
struct Lineage {
  std::string name;            ///< of the group that was shrunk first, made unique
  std::vector<int> members;    ///< its members (job ranks)
  std::vector<bool> out;       ///< by position in `members`: excluded so far
  std::uint32_t attempts = 0;  ///< made so far
};

struct Shrunk {
  std::shared_ptr<Communicator> communicator;
  Lineage lineage;  ///< for shrinking it again
};

/// Every survivor of the group that `lineage` describes calls it. Blocks until the survivors have
/// agreed and created a group of their own, in the order of the old one. `exclude`: job ranks to
/// leave behind even if they are alive; the same on all callers, and those ranks must not call.
/// Callers wait up to `options.timeout` for a live member that does not call; the error then names
/// it. A caller that the others have excluded gets a failure. Works in any state of the group's own
/// channel.
Result<Shrunk> shrink(std::shared_ptr<transport::Fabric> fabric, Lineage lineage,
                      const std::vector<int>& exclude, const CommunicatorOptions& options);

}  // namespace muster::collective
