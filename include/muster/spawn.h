// SPDX-License-Identifier: BSD-3-Clause
/// Runs a function in n processes or in n threads of this process: torch.multiprocessing.spawn.
///
/// The first failure ends the other ranks and is thrown as SpawnError, with the failed rank and its
/// text. Processes are forked, so spawn them before this process starts threads or torch computes
/// in parallel. Threads cannot be killed: their groups are aborted, so that their collectives
/// throw.
///
/// In threads mode, each rank's thread has its own default group and derived groups (`WorldScope`).
/// init_process_group, calls that name no group, and destroy_process_group refer to the group of
/// the calling thread. init_process_group without arguments joins the ranks of this spawn. A helper
/// thread started by a rank has no default group: pass it the group, or bind it
/// (`WorldScope::Binding`). When fn returns, groups the rank did not destroy are dropped without
/// the orderly shutdown of destroy_process_group. fn, its arguments and all threads are destroyed
/// by the time `spawn` or `join` returns or the context is destroyed; anything fn refers to must
/// live until then.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "muster/clock.h"
#include "muster/errors.h"

namespace muster {

enum class SpawnMode { processes, threads };

struct SpawnOptions {
  int nprocs = 1;
  bool join = true;
  SpawnMode mode = SpawnMode::processes;
  /// Time between SIGTERM and SIGKILL for processes that another rank's failure ends.
  Duration shutdown_timeout = std::chrono::seconds(10);
};

/// A spawned rank failed. `what()` starts with that rank; `ranks()` are the ranks at fault.
class SpawnError : public DistError {
 public:
  using DistError::DistError;
};

/// Running ranks, for `join = false`. The destructor kills processes but only waits for threads,
/// which must end by themselves. Not thread-safe.
class SpawnContext {
 public:
  virtual ~SpawnContext() = default;
  /// Returns true once all ranks have succeeded, false if `timeout` expires first. Throws the first
  /// failure.
  virtual bool join(std::optional<Duration> timeout = {}) = 0;
  /// Process ids by rank; empty for threads.
  virtual std::vector<pid_t> pids() const = 0;
};

namespace group {
/// An exception for a body that reports its failure in two lengths: `what()` for the caller of
/// join, `brief()` for the other ranks' errors.
class RankFailure : public DistError {
 public:
  RankFailure(const std::string& text, std::string brief, std::vector<int> earlier, int rank)
      : DistError(text, Code::internal, {rank}),
        brief_(std::move(brief)),
        earlier_(std::move(earlier)) {}
  const std::string& brief() const noexcept { return brief_; }
  /// The ranks whose failure caused this one.
  const std::vector<int>& earlier() const noexcept { return earlier_; }

 private:
  std::string brief_;
  std::vector<int> earlier_;
};

std::unique_ptr<SpawnContext> spawn_ranks(std::function<void(int)> body,
                                          const SpawnOptions& options);
}  // namespace group

/// Runs fn(i, args...) for i = 0 .. nprocs - 1. With `join`, returns null once all have succeeded;
/// otherwise returns the context to join.
template <class Function, class... Arguments>
std::unique_ptr<SpawnContext> spawn(Function fn, std::tuple<Arguments...> args,
                                    const SpawnOptions& options) {
  return group::spawn_ranks(
      [fn = std::move(fn), args = std::move(args)](int rank) {
        std::apply([&](const auto&... each) { fn(rank, each...); }, args);
      },
      options);
}
template <class Function>
std::unique_ptr<SpawnContext> spawn(Function fn, const SpawnOptions& options = {}) {
  return spawn(std::move(fn), std::tuple<>(), options);
}

}  // namespace muster
