// SPDX-License-Identifier: BSD-3-Clause
/// Reports a running job's calls to a process on another host or without access to the files:
/// `muster top --store`, `muster trace --store`.
///
/// If the job's store is a TCP store, every rank has a thread that sleeps in one request to it (no
/// processor time, nothing is sent) until a question arrives. The process that asks has proved the
/// job's secret to the store, or an observer's key (`core/store/observer_rights.h`). A rank that
/// hangs in a call still answers. For a stopped or dead rank, another rank of its host answers from
/// its file. Under the job's keys:
///   trace/job                 which job this is: written once by rank 0
///   trace/ask/<rank>          queue of questions, each about the rank or up to 256 others
///   trace/answer/<id>/<rank>  an answer; the asker deletes it, else one of that rank's next
///                             answers does. A rank keeps 8 answers and 4 MiB of them at most.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/process/fork_guard.h"
#include "core/net/link_figures.h"
#include "core/trace/reader.h"
#include "core/trace/recorder.h"
#include "muster/clock.h"
#include "muster/key_value_store.h"
#include "muster/status.h"

namespace muster::trace {

/// The maximum number of ranks that one question is about.
inline constexpr std::size_t kMostAbout = 256;  // limit: load of a rank

/// A rank's answer beside its calls.
struct RankReport {
  std::uint64_t refusals = 0;          ///< connections that its listeners have refused
  std::map<int, LinkFigures> links{};  ///< to other ranks over sockets
};

class TraceResponder {
 public:
  /// Null if the store cannot be reached from outside (kinds other than TCP), if there is no trace,
  /// or if the store does not answer: the job then runs without a responder. `job`: the job's part
  /// of the store. `report`, called on the thread, is told whether links are asked for.
  static std::unique_ptr<TraceResponder> start(std::shared_ptr<Recorder> recorder,
                                               const std::shared_ptr<store::Store>& job,
                                               std::function<RankReport(bool links)> report = {});
  ~TraceResponder();
  TraceResponder(const TraceResponder&) = delete;

  /// Lets go of the store, within seconds even where it hangs. Called before the job's store goes.
  void stop();

 private:
  struct State;
  explicit TraceResponder(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
  ProcessMark mark_;
};

struct AskOptions {
  std::size_t records = 2000;  ///< the latest so many calls of each rank
  Duration patience =
      std::chrono::seconds(2);  ///< how long ranks that do not answer are waited for
  bool links = false;           ///< also ask for figures of links
};
struct AskedJob {
  JobTrace job;
  std::vector<std::string> notes;           ///< of which ranks nothing is known, or only by hearsay
  std::map<int, std::uint64_t> refusals{};  ///< by rank that answers: connections it has refused
  /// If asked for: by the rank that sends and answers, and the one that receives.
  std::map<std::pair<int, int>, LinkFigures> links{};
};
/// The calls that the ranks of the latest job on this store are in. `store` is the whole server's,
/// not one job's part of it. Times are moved to this host's clock.
Result<AskedJob> ask_job(store::Store& store, const AskOptions& options = {});

}  // namespace muster::trace
