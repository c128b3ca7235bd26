// SPDX-License-Identifier: BSD-3-Clause
/// The job's state in the memory of a node, as its workers tell of it. Pure.
///
/// A worker's state ends with it, unless its launcher holds memory for its place: then the worker
/// that takes the place has it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "jobs/launch/workers/worker_notices.h"

namespace muster::launch {

class HeldStates {
 public:
  /// A place for each worker, without one yet.
  explicit HeldStates(int places) : places_(static_cast<std::size_t>(places)) {}

  /// Another worker runs in this place from now on.
  void begin(int place);
  /// The worker has ended. Words that it said before may still be taken.
  void end(int place);
  /// `keeps_count`: commits that are lost count for `committed` still, as the job ends for them.
  void take(int place, const WorkerWords& words, bool keeps_count);
  /// An epoch began without this node: what its workers had is no state of the job's any more, and
  /// what they say before others have taken their places counts for nothing.
  void leave();

  /// The launcher has been given the last commit of a worker that had the state before `leave`.
  void keep() { kept_commit_in_ = left_in_; }

  /// The newest state of any place.
  HeldState newest() const;
  /// The epoch in which workers got a state of which a part has ended with one of them, or all of
  /// it with the last; 0: none, or workers here have got a newer one since.
  std::int64_t gone_in() const;
  /// The place whose worker has that, whole and in its own memory alone; -1: none.
  int holder() const;
  /// The newest commit that a worker has told of since state was lost, or this node left; 0: none.
  std::int64_t committed() const { return committed_; }
  /// The epoch in which workers got the state of which the launcher has a commit, or parts, since
  /// this node left; 0: none, or the next workers have the job's state.
  std::int64_t kept_in() const;

 private:
  struct PlaceState {
    HeldState state{};
    bool ended = true;
    bool in_memory = false;    // its launcher holds memory
    bool left = false;         // its worker is of an epoch that the others have left
    std::int64_t kept_in = 0;  // of what the memory had then
    std::int64_t gone_in = 0;  // of what ended with earlier workers
    std::int64_t ended_with() const {
      return ended && !in_memory ? std::max(gone_in, state.epoch) : gone_in;
    }
  };

  std::vector<PlaceState> places_;
  std::int64_t committed_ = 0;
  std::int64_t left_in_ = 0;         // the epoch of the newest state at the last `leave`
  std::int64_t kept_commit_in_ = 0;  // as `kept_in`, of a commit that was given
};

}  // namespace muster::launch
