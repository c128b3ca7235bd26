// SPDX-License-Identifier: BSD-3-Clause
/// Decides what becomes of an epoch whose group has failed while all its processes live: a pure
/// function of the time and of who could not reach whom. Nodes are their slots.
///
///  1. Until `settle` after the first report nothing is decided: the end of a process may be behind
///     it, which other rules answer. Members that have not reported are waited for until
///     `patience`, and blamed ones among them until `death_patience`, if that is longer. If a
///     worker has said that it ends, its exit is waited for until `exit_patience`.
///  2. A pair that is blamed for the first time has failed by chance: the same members go on in a
///     new epoch. So has one whose last failure is `window` or longer ago, if a newer commit was
///     made since or no commit was known then: a job that commits nothing shows no progress, so the
///     failure counts as a restart, without which epochs could go on without end. A failure that no
///     report blames anybody for is taken for a pair of its own.
///  3. Another pair is bad. The smallest set of members that has one of each bad pair is to be left
///     out; of several such sets the one that is blamed most, then the one with the highest slots
///     (with more than 16 members involved a set that is small, not always the smallest). The
///     members that are left can all reach each other.
///  4. One of that set is left out in each epoch: the one that is blamed most, then the highest
///     slot. A member's state in memory has its second copy on the next member, so two neighbours
///     together would take the last commit with them. A pair that is bad still fails again, and
///     costs the next one.
///  5. Never more than half of the members are left out (with `majority` never half either), nor so
///     many that fewer than `least` remain, nor one for trouble within itself alone, nor one that
///     is needed for the job's state: the only one that has it in memory, or, once a part of a
///     divided state has been lost since its last commit, any that has a part. Then the same
///     members go on, and that counts as a restart.
///
/// The record of the epoch says which pairs were blamed before, and which nodes were left out, and
/// for how long that had been so: nodes decide alike by it whether they saw it or came later. A
/// node that reads the record late takes both for younger by that time, never for older.
///
/// A member blames each pair of itself and another. If that other one has blamed members, but not
/// this one, it is taken at its word: the blame was hearsay. That word may be wrong: if the link
/// between 0 and 2 is cut and 2 tells 1 so, 1 closes its connection to 0, which then blames 1 and
/// not 2. But 0 or 2 blames the cut link each time. So hearsay is remembered like other pairs, and
/// is judged if no other pair was blamed before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "muster/clock.h"

namespace muster::membership {

/// Slots in ascending order; equal for trouble among the processes of one node.
using SlotPair = std::pair<int, int>;

constexpr SlotPair kNobody{-1, -1};  ///< for a failure of which no report blames anybody

/// A pair that was blamed in an earlier epoch.
struct EarlierBlame {
  SlotPair pair;
  TimePoint at{};
  std::int64_t committed = 0;  ///< the newest commit that was known then
};

struct FailureOptions {
  Duration settle = std::chrono::milliseconds(500);     // limit: news of a death take as long
  Duration patience = std::chrono::milliseconds(1500);  // limit: of two seconds in all
  /// Until when a blamed member that says nothing may be a dead one that the service still holds.
  Duration death_patience{0};
  /// Until when a worker may take to end that has said it will: exit handlers, a core dump.
  Duration exit_patience = std::chrono::seconds(30);  // limit: as the launcher gives a worker
  Duration window = std::chrono::seconds(60);         // limit: so rare is chance
  std::size_t least = 1;
  bool majority = false;
};

struct BlamedGroup {
  std::vector<int> members;                ///< slots
  std::map<int, std::vector<int>> blamed;  ///< by each slot that has reported; empty: not known
  TimePoint since{};                       ///< of the first report
  std::vector<EarlierBlame> before{};
  std::int64_t committed = 0;  ///< the newest commit that a report names; 0: none
  bool ending = false;         ///< a worker of a member has said that it ends
  std::vector<int> needed{};   ///< members without which the job's last commit would be lost
};

struct FailureVerdict {
  bool decided = false;
  TimePoint again = TimePoint::max();  ///< if not: when to ask again
  std::vector<int> left_out{};
  std::vector<SlotPair> bad{};  ///< pairs that were blamed before as well
  /// There are bad pairs and no member may be left out for them, or a job without commits fails
  /// again.
  bool counts_as_restart = false;
};

/// The pairs that the reports blame, each once, in ascending order; `kNobody` if there is none.
/// Without hearsay, unless there is nothing else.
std::vector<SlotPair> blamed_pairs(const std::map<int, std::vector<int>>& blamed);
/// The same, hearsay included: what is remembered.
std::vector<SlotPair> all_blamed_pairs(const std::map<int, std::vector<int>>& blamed);
/// The smallest set of slots that has one of each pair, as rule 3 chooses it; exact for pairs of at
/// most 16 slots, and of more the slot with the most pairs is taken again and again. A pair of one
/// slot, and `kNobody`, is left alone. Ascending.
std::vector<int> smallest_cover(const std::vector<SlotPair>& pairs,
                                const std::map<int, std::vector<int>>& blamed);
FailureVerdict judge_failure(TimePoint now, const BlamedGroup& failure,
                             const FailureOptions& options);

}  // namespace muster::membership
