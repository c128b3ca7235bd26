// SPDX-License-Identifier: BSD-3-Clause
/// What `muster dash` answers to its page, as JSON:
///
///   /api/state                 what `muster top --json` prints, and for each rank
///                              `behind_seconds`; `over`, `lost`, `epoch`, `restarts`, `events`
///   /api/timeline?columns=N    of the last 30 s: `ranks`, each with its `columns` (timeline.h)
///   /api/rank?rank=N           its last calls, and what its last failure said
///   /api/stacks?rank=N         `sections` with `source` and `text`, `notes`; with native=1 of C++
///                              too, which stops the process (stacks.h)
///   /api/logs                  `logs` with `name` and `bytes`
///   /api/log?name=NAME         its end
///
/// An error is {"error": TEXT}, with 400 for a bad parameter, 404 for what there is not and 503 for
/// a job that cannot be seen. Texts are a program's, and are not to be taken for HTML.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "faces/cli/dash/dash_job.h"
#include "faces/cli/dash/dash_server.h"
#include "faces/cli/dash/log_tails.h"
#include "muster/clock.h"

namespace muster::cli {

struct DashPlaces {
  std::string logs;    ///< the launcher's --log-dir; empty: none
  std::string events;  ///< the launcher's --events; empty: none
};

/// Thread-safe.
class DashReplies {
 public:
  DashReplies(std::shared_ptr<DashJob> job, DashPlaces places)
      : job_(std::move(job)), places_(std::move(places)) {}
  DashReply reply(const DashQuery& query);

 private:
  DashReply state(const DashLook& look) const;
  DashReply timeline(const DashLook& look, const DashQuery& query) const;
  DashReply rank(const DashLook& look, const DashQuery& query) const;
  DashReply stacks(const DashLook& look, const DashQuery& query);
  DashReply logs(const DashLook& look);
  DashReply log(const DashLook& look, const DashQuery& query);

  std::vector<LogOfJob> known_logs(const DashLook& look);

  const std::shared_ptr<DashJob> job_;
  const DashPlaces places_;
  std::mutex debugging_;  // one debugger at a time
  std::mutex listing_;    // guards both below; held while logs are looked for
  std::vector<LogOfJob> logs_;
  TimePoint logs_until_{};  // then they are looked for again
};

}  // namespace muster::cli
