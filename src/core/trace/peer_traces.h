// SPDX-License-Identifier: BSD-3-Clause
/// The last calls of other ranks, also of those that no longer answer.
///
/// The trace files of ranks of this host are read directly, without their help. Ranks of other
/// hosts publish their last calls in the job's store, at most once a second and only if they have
/// begun or ended a call since, so the information may be a second old. Nothing is published if all
/// ranks share a host. Ages across hosts are as accurate as the hosts' wall clocks.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/base/process/fork_guard.h"
#include "core/trace/reader.h"
#include "core/trace/recorder.h"
#include "muster/key_value_store.h"

namespace muster::trace {

class PeerTraces {
 public:
  /// `elsewhere`: the ranks of other hosts. If there are any, starts a thread that publishes over a
  /// clone of `store` with short timeouts.
  PeerTraces(std::shared_ptr<Recorder> recorder, std::shared_ptr<store::Store> store,
             std::vector<int> elsewhere);
  ~PeerTraces();
  PeerTraces(const PeerTraces&) = delete;

  /// The last calls of the ranks in `only` (all, if it is empty), as far as they can be known;
  /// `records` may be cut down to the latest of each group. Blocks for some seconds at most, and
  /// only if there are other hosts.
  JobTrace look(std::span<const int> only = {}) const;
  /// The end of a sentence: "; rank 2's last call there is ..." for each of the first few `ranks`
  /// that something is known of.
  std::string tell(const std::string& group, std::span<const int> ranks) const;

  /// Lets go of the store. Called before the job's store goes.
  void stop();

 private:
  void publish();

  const std::shared_ptr<Recorder> recorder_;
  const std::vector<int> elsewhere_;
  ProcessMark mark_;
  mutable std::mutex lock_;  // guards `store_` and `stop_`; not held while the store is used
  std::shared_ptr<store::Store> store_;  // null: none, or stopped; set back after the thread's end
  std::condition_variable changed_;
  bool stop_ = false;
  std::thread thread_;
};

/// Which of the `members` hold up call `sequence` of `group`, and sentences that say what each of
/// them did last. `awaited` are the ranks the caller knows it waits for. The result is those of
/// them that have not entered the call, else other members that have not, else `awaited`.
struct PeerReport {
  std::vector<int> missing;
  std::string text;  ///< empty where nothing is known
};
PeerReport report_peers(const JobTrace& job, const std::string& group, std::uint64_t sequence,
                        std::span<const int> members, int me, const std::vector<int>& awaited);

/// A trace cut down to the latest call of each group, as bytes and back.
std::string encode_latest(const RankTrace& trace);
std::optional<RankTrace> decode_latest(std::string_view bytes);

}  // namespace muster::trace
