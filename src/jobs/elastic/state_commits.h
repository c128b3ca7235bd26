// SPDX-License-Identifier: BSD-3-Clause
/// The commits of a State, of either language: how they are made, agreed on, restored, and given to
/// the ranks of the next epoch.
///
/// Without shards a commit is a copy in the process's memory, in one of two places: no rank has
/// more than the others, so a survivor has everything. With shards it lies in memory files
/// (memory_commits.h).
///
/// If the job goes on without a node, one of its processes gives its last commit to its launcher in
/// a memory file, and the node's next processes begin with that. It is older than what the others
/// have, and is used only if nobody has that any more: the commit of the later epoch is the newer
/// one, whatever its number, as ranks that begin an epoch alike have the same commit and those that
/// an epoch left out make none in it. The processes end before the next ones start, so nothing has
/// two owners, and a device is not asked for twice its memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "jobs/elastic/commit_memory.h"
#include "jobs/elastic/epoch_follower.h"
#include "jobs/elastic/memory_commits.h"
#include "muster/elastic.h"

namespace muster::elastic {

/// The part of a State that all ranks have alike. Tensors have names, for errors; `rest` is any
/// bytes.
struct AlikeContents {
  std::string rest;
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
};

/// The part that is divided among the ranks. `values` are JSON, alike on all ranks.
struct ShardedContents {
  std::vector<checkpoint::CheckpointItem> items;
  std::string values;
};

/// The objects of a State, and those that a ShardedState has bound to it, as a language has them.
/// Called without autograd by the thread that commits or restores.
class StateObjects {
 public:
  virtual AlikeContents contents() = 0;
  /// Copies from the tensors, and drops the gradients of modules.
  virtual void put_back(const AlikeContents& contents) = 0;
  /// Seeds random generators for the step after that commit.
  virtual void reseed(std::int64_t commit, int rank) = 0;

  virtual ShardedContents sharded_contents() = 0;
  /// The items to fill, as StateAccess::wanted has it. Nothing changes before `put_back_sharded`.
  virtual std::vector<checkpoint::CheckpointItem> wanted_shards(const shards::Index& index) = 0;
  /// After the last wanted items have been filled. Drops gradients.
  virtual void put_back_sharded() = 0;

 protected:
  ~StateObjects() = default;
};

/// The errors of wrong calls, in the words of a language.
struct StateRefusals {
  const char* no_commit;
  const char* nothing_bound;
  const char* not_restored;
  const char* bound_already;
};

/// Used by one thread at a time, but for `hand_over`. Calls on a group are on the default one, and
/// throw DistError as collectives do.
class StateCommits final : public CommitKeeper {
 public:
  StateCommits(StateObjects& objects, const StateRefusals& refusals)
      : objects_(objects), refusals_(refusals) {}
  ~StateCommits();
  StateCommits(const StateCommits&) = delete;
  StateCommits& operator=(const StateCommits&) = delete;

  /// Number of the last commit. 0: none.
  std::int64_t number() const { return in_memory_ > 0 ? in_memory_ : last().id.number; }
  /// Collective. True: this process's node is to be given up.
  bool commit();
  /// Not collective: puts the last commit back.
  void restore();

  /// The last commit, of a state without shards and once more has been committed than the program
  /// loaded. Any thread may call it.
  std::optional<CommitMemory> hand_over() override;
  /// Memory that a launcher has held.
  void adopt(std::vector<Descriptor> files);
  /// Collective: each rank then has the last commit of the ranks that have any, else rank 0's state
  /// as the first one.
  void from_survivors();
  /// Collective: all ranks have come to the end of training, with equally many commits.
  void agree_on_end();
  /// Not collective: goes back to the last commit, for a process that leaves. A state that came
  /// from others and has not been trained with stays as it came.
  void before_leaving();

  /// Something sharded is part of the state until `unbind`.
  void bind();
  void unbind() { bound_ = Bound::nothing; }
  /// Collective: as ShardedState::restore.
  void restore_sharded();

 private:
  enum class Bound : std::uint8_t { nothing, unrestored, restored };
  enum class FilledFrom : std::uint8_t { all_ranks, here };
  struct Commit {
    CommitId id;  // number 0: none
    AlikeContents contents;
    std::vector<c10::Event> written;  // on the accelerators that its tensors are on
    // Of a process that an epoch left out: its last epoch. 0: all that were made since are here.
    std::int64_t left_in = 0;
  };

  Commit& last() { return commits_[current_]; }
  const Commit& last() const { return commits_[current_]; }
  Commit& spare() { return commits_[1 - current_]; }
  void turn();

  bool commits_in_memory() const;
  void take(std::int64_t number);
  void write(std::int64_t number);
  void made_in_memory(std::int64_t number);
  void fill_from(const FoundCommit& commit, bool with_shards, FilledFrom from);
  void share_from(int source);
  void load(const CommitMemory& memory);
  void note_lost(std::int64_t newest, std::int64_t complete) const;
  std::int64_t complete_until() const;
  void reseed();
  void note_state() const;

  StateObjects& objects_;
  StateRefusals refusals_;
  // Guards `current_`, the commit that it names, and `handed_over_`: only the other commit is
  // written without it.
  mutable std::mutex mutex_;
  Commit commits_[2];  // without shards; memory of tensors stays for later commits
  int current_ = 0;
  bool handed_over_ = false;
  MemoryCommits memory_;        // with shards
  std::int64_t in_memory_ = 0;  // number of the last commit there; 0: it is in `commits_`
  Bound bound_ = Bound::nothing;
  bool is_kept_ = false;  // the follower knows of these commits
};

/// The commits of a State in C++.
struct StateSync {
  static StateCommits& commits_of(State& state);
};

}  // namespace muster::elastic
