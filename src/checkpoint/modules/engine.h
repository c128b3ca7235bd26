// SPDX-License-Identifier: BSD-3-Clause
/// Items to files and back, over a process group.
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/format/files/index.h"
#include "checkpoint/format/save.h"
#include "checkpoint/modules/items.h"
#include "muster/checkpoint.h"
#include "muster/process_group.h"

namespace muster::checkpoint {

/// Saves that may go on behind the program's back, one after the other, of one group. All members
/// make the same calls in the same order; one thread at a time.
class Saver {
 public:
  /// `group` null: this process alone.
  explicit Saver(const Group& group);
  /// Ranks that are no members of a muster group. `here` exchanges on the caller's thread, `behind`
  /// on the saver's own, at the same time: their texts must not meet.
  Saver(shards::SavingRanks here, shards::SavingRanks behind);
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  /// As Saving::wait, but the failure counts as not reported: the next save throws it again.
  static void wait_unreported(const Saving& saving);

  /// In place of a save that this rank cannot begin: the other ranks throw `why` from theirs.
  void fail(const std::exception& why) noexcept;

  /// Collective. First waits for the last save. If that failed and a rank has not reported the
  /// failure yet, throws it on all ranks.
  void save(const std::vector<CheckpointItem>& items, const std::string& values,
            const shards::CommitOptions& options);
  /// Returns when what this rank will write has been copied; the items may change from then on. The
  /// memory of the copy stays for the next save.
  Saving async_save(const std::vector<CheckpointItem>& items, const std::string& values,
                    const shards::CommitOptions& options);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The saver of a group, whose saves wait for each other; of a process alone, one for null. It
/// lives as long as the group. Any thread.
std::shared_ptr<Saver> saver_of(const Group& group);

/// The code and text of an exception, for the other ranks.
Status status_of(const std::exception& error);

/// The ranks of a group; null: this process alone.
shards::SavingRanks ranks_of(const Group& group);

/// Whether the checkpoint has all items, with these sizes and types that can be cast, in files that
/// are as they were saved: before any tensor is filled.
Status check_items(const shards::Index& index, const std::vector<CheckpointItem>& items);

/// Fills the items' tensors from the checkpoint; of another floating-point or integer type, with a
/// cast. Collective by `ranks`: throws DistError on all ranks where it fails on one, and says how
/// many tensors have been filled.
void load_items(const shards::Index& index, const std::vector<CheckpointItem>& items,
                const shards::SavingRanks& ranks);

}  // namespace muster::checkpoint
