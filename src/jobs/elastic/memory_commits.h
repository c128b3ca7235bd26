// SPDX-License-Identifier: BSD-3-Clause
/// The commits of a job whose ranks have parts that no other rank has: each rank's lie in memory
/// files that its launcher holds too, and, with several nodes, in memory of a rank of the next one.
/// Both languages' states use it.
///
/// An epoch has memories of its own: two for this rank's commits, two for those of each rank whose
/// partner it is. Commits of earlier processes and epochs stay within reach until the first commit
/// of the epoch has been made.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/format/files/index.h"
#include "checkpoint/format/save.h"
#include "checkpoint/modules/items.h"
#include "jobs/elastic/commit_memory.h"
#include "jobs/elastic/piece_plan.h"

namespace muster::elastic {

/// This rank's part of a commit. `values`: any bytes, alike on all ranks.
struct CommitContents {
  std::vector<checkpoint::CheckpointItem> items;
  std::string values;
  std::size_t alike = 0;  ///< so many items, the first ones, all ranks have alike
};

/// A commit that can be restored.
struct FoundCommit {
  CommitId id;
  std::string values;
  shards::Index index;  ///< types and sizes of its tensors, for `StateAccess::wanted`
  PieceMap pieces;
};

/// One thread at a time. Collective calls are on the default group, and throw DistError as
/// collectives do.
class MemoryCommits {
 public:
  /// Memory that a launcher has held. Gives those files that are commits without parts.
  std::vector<CommitMemory> adopt(std::vector<Descriptor> files);
  /// Descriptors of all memory within reach, which the launcher is given. They belong to this
  /// object.
  std::vector<int> files() const;
  /// Whether this process can read any commit.
  bool has_any() const;

  /// Collective. The newest commit of the job, or none if there is none. Throws DistError on all
  /// ranks if there is one that cannot be restored; then forgets all.
  std::optional<FoundCommit> find();
  /// Whether this process has its part of the last commit that it knows of. False for a commit that
  /// it only received from others.
  bool has_last() const { return last_ && last_->label(); }
  /// That part; not collective.
  FoundCommit last() const;
  /// Collective: fills the items' tensors.
  void fill(const FoundCommit& commit, const std::vector<checkpoint::CheckpointItem>& items) const;
  /// As `fill`, of `last`.
  void fill_here(const FoundCommit& last,
                 const std::vector<checkpoint::CheckpointItem>& items) const;

  /// Collective, before the first commit of an epoch. `restored`: what `find` has given; all else
  /// is forgotten now, and that with the first commit.
  void begin_epoch(std::int64_t epoch, std::int64_t node, const std::optional<CommitId>& restored);
  /// Collective: this rank's part is written here, and what no other rank has at its partner's. It
  /// is no commit before all ranks have agreed that it is, of which `agreed` tells.
  void write(std::int64_t number, const CommitContents& contents);
  void agreed();

 private:
  using Memory = std::shared_ptr<CommitMemory>;
  using Pair = std::array<Memory, 2>;
  struct Guest {
    int rank = 0;
    Pair memories;
  };

  std::vector<ReachablePart> parts_here(int rank) const;
  std::vector<PieceSource> sources_of(const CommitId& id, const shards::SavingRanks& ranks,
                                      std::string& values) const;
  void exchange_pieces(const PieceMap& pieces, const std::vector<shards::Shard>& wanted,
                       const std::vector<MutableBytes>& targets) const;
  void send_to_partner(CommitLabel label, std::string description, MutableBytes data);

  // Other ranks name these by their number here, so it does not change from `find` to `fill`.
  std::vector<Memory> reachable_;
  std::int64_t epoch_ = -1;
  int partner_ = -1;
  Pair own_;
  Memory last_;  // this process's part of its last commit, also while the next epoch begins
  std::vector<Guest> guests_;
  // The memories of the pairs that are written next. Changes only once a commit is agreed, so one
  // that fails never overwrites the last.
  int turn_ = 0;
  bool has_earlier_ = false;  // `reachable_` has more than this epoch's
};

}  // namespace muster::elastic
