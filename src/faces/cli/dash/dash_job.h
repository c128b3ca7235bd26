// SPDX-License-Identifier: BSD-3-Clause
/// The job that `muster dash` shows: looked at when somebody asks, at most once a second, and no
/// longer than a quarter of the time, so that 512 ranks and several browsers cost no core.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "faces/cli/dash/job_events.h"
#include "faces/cli/top/trace_choice.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::cli {

/// A look at the job.
struct DashLook {
  ShownJob shown;
  bool over = false;  ///< all ranks' processes are gone, or the job's traces are
  bool lost = false;  ///< the job does not answer now, and this is what was seen last
  nlohmann::json replaced = nlohmann::json::array();  ///< see ReplacedRanks
};

/// Thread-safe.
class DashJob {
 public:
  using Look = std::function<Result<ShownJob>()>;
  /// `ended` is called by the thread that sees that a job which was not over is.
  explicit DashJob(Look look, Duration between_looks = std::chrono::seconds(1),
                   std::function<void()> ended = {})
      : look_(std::move(look)), between_looks_(between_looks), ended_(std::move(ended)) {}

  /// The latest look; those who ask while another thread looks get the one before. An error only if
  /// there was none.
  Result<std::shared_ptr<const DashLook>> latest();

 private:
  std::shared_ptr<const DashLook> look_again();
  std::shared_ptr<const DashLook> kept();

  const Look look_;
  const Duration between_looks_;
  const std::function<void()> ended_;
  std::mutex looking_;  // held by the thread that looks; guards `next_`, `replaced_`, `problem_`
  TimePoint next_{};
  ReplacedRanks replaced_;
  Status problem_;
  std::mutex lock_;  // guards `last_`; taken after `looking_`
  std::shared_ptr<const DashLook> last_;
};

}  // namespace muster::cli
