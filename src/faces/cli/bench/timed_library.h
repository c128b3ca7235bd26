// SPDX-License-Identifier: BSD-3-Clause
/// The ranks of a library that is measured: how they start, what they are asked, how they end.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/descriptor.h"
#include "faces/cli/bench/measurement.h"
#include "muster/status.h"

namespace muster::cli::bench {

/// Number, kind and transport of the ranks, the same for every library in a run.
struct RankOptions {
  int ranks = 2;
  std::string transport = "shm";  ///< or "tcp"
  bool threads = false;           ///< muster's ranks as threads of one process
  bool tensors = true;  ///< muster's ranks call muster::all_reduce(tensor) and its like, where this
                        ///< build has them; else the engine
};

/// How to start the ranks of a library, all by one command.
struct StartPlan {
  std::string library;
  std::vector<std::string> command;
  std::vector<std::pair<std::string, std::string>> environment;  ///< set on top of ours
  bool engine = false;         ///< muster's engine alone, below the tensors
  std::string transport = {};  ///< where that is not the one of `RankOptions`
};

/// The path of another program in the folder of this one. It may not exist.
std::string program_beside(const std::string& name);

/// muster's ranks: those of `muster_bench_worker` beside this program, or, with the engine alone,
/// of this program's own `bench-worker`. `folder` has the pipes of measurement.h.
StartPlan plan_muster(const RankOptions& options, const std::string& folder);

class TimedLibrary {
 public:
  /// Starts the ranks; they get ready while the first cell waits for them.
  static Result<std::unique_ptr<TimedLibrary>> start(const StartPlan& plan, int ranks,
                                                     const std::string& folder);
  /// Asks them to end and ends them if they do not.
  ~TimedLibrary();

  const std::string& library() const { return library_; }
  /// Blocks until the ranks have measured it or have taken far longer than they should.
  CellResult measure(const Cell& cell);

 private:
  TimedLibrary() = default;
  std::string end_of_log() const;

  std::string library_;
  std::string folder_;
  pid_t pid_ = -1;
  Descriptor pidfd_, back_;
  std::vector<Descriptor> orders_;
  std::string unread_;
  bool failed_ = false;
};

}  // namespace muster::cli::bench
