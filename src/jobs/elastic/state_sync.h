/// The state of a rank for `run`: before each epoch every rank gets the last commit of any.
#pragma once

#include "checkpoint/modules/items.h"
#include "muster/elastic.h"

namespace muster::elastic {

struct StateSync {
  /// Collective on the default group, and blocks. Each rank of the group then has the last commit
  /// of the ranks that have any, else rank 0's state as the first one.
  static void from_survivors(State& state);
  /// Not collective: goes back to the last commit, for a process that leaves. A state that came
  /// from others and has not been trained with stays as it came.
  static void before_leaving(State& state);
};

/// Collective: all ranks have made `number` commits and go on. True: some rank is to leave. Throws
/// DistError (Code::mismatch) on all ranks if their numbers differ.
bool agree_on_commit(std::int64_t number, bool leaving);

/// Throws where this rank has only a part of it.
void check_whole(const checkpoint::CheckpointItem& item);

}  // namespace muster::elastic
