// SPDX-License-Identifier: BSD-3-Clause
/// Logs which of this rank's calls wait for long, and for which ranks.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/base/process/fork_guard.h"
#include "core/trace/peer_traces.h"
#include "core/trace/reader.h"
#include "core/trace/recorder.h"
#include "muster/clock.h"

namespace muster::trace {

/// Selects the calls that have waited for `limit`, twice as long, and so on. Each is reported once
/// per step.
class WaitReports {
 public:
  explicit WaitReports(Duration limit) : limit_(limit) {}
  /// Calls of `mine` to be told of now, the oldest first.
  std::vector<const Record*> due(const RankTrace& mine, std::int64_t now_ns);

 private:
  Duration limit_;
  std::map<std::uint64_t, Duration> next_;  // by ticket
};

/// "all_reduce #7 on group default has waited for 10 s; rank 2 has not entered this call; ...".
/// `job` is what is known of the ranks.
std::string describe_wait(const Record& call, const JobTrace& job, int rank, std::int64_t now_ns);

/// From which age on a wait is reported, and how often the trace is looked at.
struct WaitLimits {
  Duration reported, between_looks;
};
/// If the log shows info, waits of ten seconds. Else stalls alone, waits of a minute, for which a
/// look in ten seconds is enough.
WaitLimits wait_limits(bool shows_info);

/// Logs the calls of this rank that are due: stalls as warnings, shorter waits as info.
void log_waits(WaitReports& reports, const Recorder& recorder, const PeerTraces& peer_traces,
               int rank, std::int64_t now_ns);

/// A thread that does so again and again. It costs calls nothing.
class LongWaits {
 public:
  LongWaits(std::shared_ptr<const Recorder> recorder, std::shared_ptr<const PeerTraces> peer_traces,
            int rank);
  ~LongWaits();
  LongWaits(const LongWaits&) = delete;
  LongWaits& operator=(const LongWaits&) = delete;

 private:
  void watch();

  const std::shared_ptr<const Recorder> recorder_;
  const std::shared_ptr<const PeerTraces> peer_traces_;
  const int rank_;
  ProcessMark mark_;
  std::mutex lock_;  // guards `stop_`
  std::condition_variable changed_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace muster::trace
