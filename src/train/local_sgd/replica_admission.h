// SPDX-License-Identifier: BSD-3-Clause
/// How replicas join others that train on.
///
/// Events follow each other: a snapshot of the outer state after a meeting, then one for each
/// meeting since. All members that train send them, a part each, and each new replica answers each
/// of them. It is these answers that the members tell each other in their meetings, so that all
/// take the new ones in after the same meeting, and none waits.
///
/// If an admission fails, for a member or for a new replica, its group is aborted.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "muster/local_sgd.h"
#include "muster/work.h"

namespace muster::parallel {

/// Aborts the group of an admission, unless that is the default group.
void end_admission(const Group& wider, const std::string& why);

struct ReplicaMeetings::Admission {
  Group wider;
  std::vector<int> senders, joiners;  // ranks of `wider`; the senders in the order of their group
  std::string failure;                // why it cannot go on, as this member sees it; empty: it can

  // A member that trains has these.
  bool sends = false;  // a snapshot has been taken
  std::int64_t events = 0;
  std::vector<at::Tensor> snapshot;  // what is sent of it, until the optimizers have been compared
  at::Tensor optimizer, optimizers;  // its bytes; of all members, their number and hash
  WorkRef comparison;                // which gathers these; null: done
  std::vector<WorkRef> sent;
  struct JoinerAnswer {
    at::Tensor meetings;
    WorkRef work;
  };
  std::vector<std::deque<JoinerAnswer>> expected;  // by joiner
  std::vector<std::int64_t> answers;               // by joiner

  // One that joins has this.
  std::vector<at::Tensor> headers;  // by sender
};

}  // namespace muster::parallel
