/// A function in n processes or n threads of this one: torch.multiprocessing.spawn.
///
/// The first failure ends the others and is thrown as SpawnError, with the failed rank and its
/// text. Processes are forks of this one: call it before the process has started threads or torch
/// has computed in parallel. Threads cannot be ended from outside: their groups are aborted, so
/// that they leave their collectives with an error.
///
/// With threads, a rank's default group and what was made from it are bound to its thread
/// (`WorldScope`): init_process_group, the calls that name no group and destroy_process_group see
/// the group of the thread they are made on; an init_process_group that is told nothing joins the
/// ranks of this spawn. A helper thread that a rank starts has none: give it the group itself, or
/// bind it (`WorldScope::Binding`). When fn returns, what the rank has not destroyed goes, without
/// the orderly end that destroy_process_group is; fn, its arguments and all threads are gone when
/// `spawn` or `join` has returned, or the context is destroyed. What fn refers to must live until
/// then.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "muster/base/clock.h"
#include "muster/group/errors.h"

namespace muster {

enum class SpawnMode { processes, threads };

struct SpawnOptions {
  int nprocs = 1;
  bool join = true;
  SpawnMode mode = SpawnMode::processes;
  Duration shutdown_timeout = std::chrono::seconds(
      10);  ///< between SIGTERM and SIGKILL for those that another's failure ends
};

/// A rank of a spawn failed: `what()` starts with it, `ranks()` are those at fault.
class SpawnError : public DistError {
 public:
  using DistError::DistError;
};

/// Ranks that run, for `join = false`. Destroying it kills processes and waits for threads, which
/// must come to an end by themselves. One thread at a time.
class SpawnContext {
 public:
  virtual ~SpawnContext() = default;
  /// True once all have ended well, false when `timeout` passed first; throws the first failure.
  virtual bool join(std::optional<Duration> timeout = {}) = 0;
  /// By rank; none for threads.
  virtual std::vector<pid_t> pids() const = 0;
};

namespace group {
/// What a body throws that tells its failure in two lengths: `what()` for the one who joins,
/// `brief()` for the errors of the other ranks.
class RankFailure : public DistError {
 public:
  RankFailure(const std::string& text, std::string brief, std::vector<int> earlier, int rank)
      : DistError(text, Code::internal, {rank}),
        brief_(std::move(brief)),
        earlier_(std::move(earlier)) {}
  const std::string& brief() const noexcept { return brief_; }
  /// The ranks whose failure led to this one.
  const std::vector<int>& earlier() const noexcept { return earlier_; }

 private:
  std::string brief_;
  std::vector<int> earlier_;
};

std::unique_ptr<SpawnContext> spawn_ranks(std::function<void(int)> body,
                                          const SpawnOptions& options);
}  // namespace group

/// Runs fn(i, args...) for i from 0 to nprocs - 1. With `join` returns null when all have ended
/// well, else what to join.
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
