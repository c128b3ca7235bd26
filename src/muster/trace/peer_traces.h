/// What a rank can find out about the others when they do not answer any more.
///
/// Ranks of this host: their traces are read where they lie; nobody needs to answer for that. Ranks
/// of other hosts: each publishes what it did last in the job's store, at most once a second and
/// only when it has made or ended a call since (so the word may be a second old); nothing is
/// published where all ranks share a host. Ages across hosts are as good as the hosts' wall clocks
/// agree.
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

#include "muster/base/fork_guard.h"
#include "muster/key_value_store.h"
#include "muster/trace/reader.h"
#include "muster/trace/recorder.h"

namespace muster::trace {

class PeerTraces {
 public:
  /// `elsewhere`: the ranks of other hosts. Where there are any, starts a thread that publishes
  /// over a clone of `store` with short timeouts.
  PeerTraces(std::shared_ptr<Recorder> recorder, std::shared_ptr<store::Store> store,
             std::vector<int> elsewhere);
  ~PeerTraces();
  PeerTraces(const PeerTraces&) = delete;

  /// What the ranks (all, where `only` is empty) did last, as far as it can be known; `records` may
  /// be cut down to the latest of each group. Blocks for some seconds at most, and only where there
  /// are other hosts.
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
  mutable std::mutex lock_;
  std::shared_ptr<store::Store> store_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::thread thread_;
};

/// Who holds up call `sequence` of `group`, of its `members`, and the sentences that say so: what
/// each of them did last. `awaited` is what the caller knows of itself: of them those that have not
/// entered the call are meant, else other members that have not, else `awaited`.
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
