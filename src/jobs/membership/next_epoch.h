// SPDX-License-Identifier: BSD-3-Clause
/// Chooses the members of the next epoch: a pure function of the time, the view and the options.
///
/// The rules, in the order in which they are looked at:
///  1. A job that has ended stays ended.
///  2. A node that has stopped ends the job. So does a failed worker once `max_restarts` are used
///     up; before, it makes a new epoch, which counts as one restart however many workers failed.
///  3. When all members have succeeded, so has the job. Once members have come to the end of
///     training it succeeds with them: a member that came too late to train is not waited for, and
///     neither its failure nor its loss changes anything. The loss of one that has trained and not
///     yet ended well ends the job, as nothing is trained again; one that fell silent has
///     `silence_patience` to come back.
///  4. A lost member makes a new epoch at once: a waiting node takes its slot; the others keep
///     theirs. Without a replacement the job shrinks, but not within `repair_timeout` of the loss,
///     not below `min_nodes`, and with `majority` not to half of the members or less. A job that
///     cannot go on waits `join_timeout` for nodes, then fails; with `wait_for_nodes` false, at
///     once. If the members that are left may not have all of the job's state in memory, one that
///     fell silent and has it, or a part, is waited for as long as it keeps its workers,
///     `silence_patience`; if no member has it, so is one whose launcher keeps the newest commit,
///     or whose workers may have made one of which it could not tell; also if an earlier epoch left
///     it out, and of a divided state if nothing was committed since. Nodes that wait and keep the
///     newest commit then get seats first. If this node knows that the service was
///     silent, all that fell silent may have done so for that alone, and have `returning` to come
///     back, before the first epoch too.
///  5. If the group of the epoch has failed while all its processes live, `failure_rule.h` says
///     which members go on in a new epoch. A node that was left out waits for the rule's
///     window, unless fewer than `min_nodes` are there without it; nodes that wait take its seat.
///  6. Nodes that wait take free seats up to `max_nodes`, unless a member has succeeded already: a
///     job that is about to end is not started again for a new node. Nodes that were started with
///     other numbers of nodes or another program get none.
///  7. The first epoch begins when `max_nodes` are there; or when `min_nodes` are and nobody came
///     for `last_call`.
/// A node waits in the order of its arrival. A slot goes to a node of the host that had it before,
/// else the lowest free slot to the first that waits. Nodes of a host that was in trouble
/// `blacklist_after` times within `blacklist_cooldown` are passed over until that has passed.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "jobs/membership/failure_rule.h"
#include "jobs/membership/job_view.h"
#include "jobs/membership/membership.h"
#include "muster/clock.h"

namespace muster::membership {

struct EpochOptions {
  int min_nodes = 1;
  int max_nodes = 1;
  int max_restarts = 0;
  Duration join_timeout = std::chrono::seconds(600);
  Duration last_call = std::chrono::seconds(30);
  Duration repair_timeout{0};
  /// A node that is silent for this long has ended its workers.
  Duration silence_patience{0};
  /// A worker's failure counts only after this time, unless it was killed: it may be the first sign
  /// that a node is lost, where the service sees that late.
  Duration failure_patience{0};
  bool wait_for_nodes = true;  ///< false: a loss that leaves fewer than `min_nodes` ends the job
  bool majority = false;
  /// The workers may have state in memory: a lost member of which this node has never heard may be
  /// one that has it.
  bool keeps_state = false;
  int blacklist_after = 0;  ///< 0: no host is ever passed over
  Duration blacklist_cooldown = std::chrono::seconds(60);
  FailureOptions failures{};  ///< `least` and `majority` are set
  std::string program_id{};   ///< as in NodeReport; empty: any
};

/// Whether a node starts the program of these options, as far as both say which.
inline bool is_same_program(const NodeReport& report, const EpochOptions& options) {
  return report.program_id.empty() || options.program_id.empty() ||
         report.program_id == options.program_id;
}

struct Decision {
  /// False: nothing is to be committed now.
  bool commit = false;
  JobState state = JobState::running;
  int restarts = 0;
  int exit_code = 0;
  std::string reason;
  std::vector<int> vacated;                         ///< slots that their nodes lose
  std::vector<int> left_out;                        ///< slots whose nodes are there, and lose them
  std::vector<std::pair<int, std::string>> seated;  ///< slots that waiting nodes get
  TimePoint again = TimePoint::max();               ///< when to ask again if nothing changes
  /// If nothing is committed for the sake of the job's state: who is waited for, why, and how long.
  std::string waits_for{};
  std::vector<int> awaited{};  ///< their slots; -1: of one that had no seat
  TimePoint awaited_until{};
  TimePoint at{};  ///< when it was made
  /// Trouble of a host before that counts no more.
  TimePoint troubles_since = TimePoint::max();
  std::size_t looked_at = 0;  ///< nodes and slots that it took to decide
};

/// `returning`: until when nodes that fell silent with the service itself may take their places
/// again; zero: it was not silent.
Decision next_epoch(TimePoint now, const JobView& view, const EpochOptions& options,
                    TimePoint returning = TimePoint{});

/// The whole epoch that a decision to commit means.
Epoch make_epoch(const JobView& view, const Decision& decision);

}  // namespace muster::membership
