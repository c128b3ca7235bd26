/// How the survivors of a group agree on who is left, while more of them may die.
///
/// Two stages, repeated until both succeed without a death in between:
///   1. Views. A member's view is (attempt, who is out). It tells everybody whom it does not count
///      out, again whenever the view grows: by a member that turns out to be gone, or by another's
///      view, which it joins (the higher attempt, the union of those that are out). When all that
///      it still counts in have told it exactly its own view, it decides.
///   2. Those decided upon make a group, which succeeds only where all of them have decided the
///      same and are alive. Who fails in it starts the next attempt with what it knows now; so
///      does, later, who succeeded in it with a member that died meanwhile: shrinking the new group
///      continues the attempts of the old one, which is where both meet.
/// Nobody leads the first stage, so that any rank may die in it, rank 0 too. It costs n * (n - 1)
/// notes for every view.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/base/clock.h"
#include "muster/base/status.h"
#include "muster/collective/communicator.h"
#include "muster/transport/fabric.h"

namespace muster::collective {

/// The first stage of one member as a state machine: no I/O, no clock. Members are positions in the
/// group that is being shrunk first.
class SurvivorViews {
 public:
  /// `out`: by position, who is counted out from the start.
  SurvivorViews(int self, std::vector<bool> out, std::uint32_t attempt);

  /// What a member tells.
  struct View {
    std::uint32_t attempt = 0;
    std::vector<bool> out;
    friend bool operator==(const View&, const View&) = default;
  };
  const View& view() const { return view_; }
  /// Whether the view must be told (again) to all that it counts in; asking takes note that it is.
  bool take_news();
  /// The next attempt, with what is known.
  void start_over();
  void heard(int member, const View& theirs);
  void gone(int member);
  /// Everybody that the view counts in has told exactly this view.
  bool decided() const;
  /// Another member has counted this one out.
  bool excluded() const { return view_.out[static_cast<std::size_t>(self_)]; }
  bool counts_in(int member) const { return !view_.out[static_cast<std::size_t>(member)]; }
  /// Who is counted in and has not told this view yet.
  std::vector<int> awaited() const;

 private:
  void grow(const View& other);

  const int self_;
  View view_;
  bool news_ = true;
  std::vector<std::optional<View>> told_;  // the latest of each member
};

/// What connects a group with those it was shrunk from; part of what survivors meet by.
struct Lineage {
  std::string name;            ///< of the group that was shrunk first, with what tells it apart
  std::vector<int> members;    ///< its members (job ranks)
  std::vector<bool> out;       ///< by position in `members`: who was left behind by now
  std::uint32_t attempts = 0;  ///< made by now
};

struct Shrunk {
  std::shared_ptr<Communicator> communicator;
  Lineage lineage;  ///< for shrinking it in turn
};

/// Every survivor of the group that `lineage` describes calls it; blocks until those that are left
/// have agreed and made a group of their own, in the order of the old one. `exclude`: job ranks
/// that are to be left behind though they may be alive; the same on all callers, and they must not
/// call. A member that is alive and does not call is waited for, up to `options.timeout`, and then
/// named. A caller that the others have counted out gets a failure. Works whatever has happened to
/// the group's own channel.
Result<Shrunk> shrink(std::shared_ptr<transport::Fabric> fabric, Lineage lineage,
                      const std::vector<int>& exclude, const CommunicatorOptions& options);

}  // namespace muster::collective
