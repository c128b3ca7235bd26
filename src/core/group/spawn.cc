// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/spawn.h"

#include <future>
#include <mutex>
#include <thread>

#include "core/base/process/interruption.h"
#include "core/base/threads/thread_start.h"
#include "core/group/errors.h"
#include "core/group/world.h"
#include "core/store/factory.h"

namespace muster::group {
namespace {

struct RankOutcome {
  Status status;             ///< for the caller of join
  std::string brief;         ///< for the other ranks
  std::vector<int> earlier;  ///< for `transport::Fabric::fail_rank`
};

/// Runs one rank's body and converts its exception.
RankOutcome run_rank(const std::function<void(int)>& body, int rank) {
  try {
    body(rank);
    return {};
  } catch (const RankFailure& error) {
    return {Status(error.code(), error.what(), error.ranks()), error.brief(), error.earlier()};
  } catch (const DistError& error) {
    return {Status(error.code(), error.what(), error.ranks()), error.what(), error.ranks()};
  } catch (const std::exception& error) {
    return {Status(Code::internal, error.what(), {rank}), error.what(), {}};
  } catch (...) {
    const char* what = "threw something that is no std::exception";
    return {Status(Code::internal, what, {rank}), what, {}};
  }
}

class ThreadContext : public SpawnContext {
 public:
  ThreadContext(std::function<void(int)> body, int count) {
    const auto store = store::make_hash_store();
    outcomes_.resize(static_cast<std::size_t>(count));
    for (int rank = 0; rank < count; ++rank)
      scopes_.push_back(std::make_shared<World>(SpawnedRank{store, rank, count}));
    auto run = [this, body = std::move(body), count] {
      const auto rank_body = [&](int rank) {
        const auto& scope = scopes_[static_cast<std::size_t>(rank)];
        const WorldScope::Binding binding(scope);
        const Interruption::InterruptionBinding waits(interruption_);
        auto& outcome = outcomes_[static_cast<std::size_t>(rank)] = run_rank(body, rank);
        return outcome.status;
      };
      // The other ranks are told of a failure only after it is recorded, so that their resulting
      // errors do not count as the first failure.
      const auto tell = [this](int culprit, const Status& failure) { end_after(culprit, failure); };
      const auto leave = [this](int rank) {
        const auto& scope = scopes_[static_cast<std::size_t>(rank)];
        const WorldScope::Binding binding(scope);
        scope->drop();
      };
      return spawn_threads(count, rank_body, {.on_first_failure = tell, .at_end = leave});
    };
    const auto result = std::make_shared<std::promise<Status>>();
    result_ = result->get_future().share();
    thread_ = take(start_thread("the thread that starts the ranks",
                                [result, run = std::move(run)] { result->set_value(run()); }));
  }
  ~ThreadContext() override {
    if (thread_.joinable()) thread_.join();
  }
  bool join(std::optional<Duration> timeout) override {
    if (timeout && result_.wait_for(*timeout) != std::future_status::ready) return false;
    if (thread_.joinable()) thread_.join();
    if (const auto status = result_.get(); !status.ok()) throw SpawnError(status);
    return true;
  }
  std::vector<pid_t> pids() const override { return {}; }

 private:
  void end_after(int culprit, const Status& failure) {
    interruption_->raise(failure.message());
    const auto at = static_cast<std::size_t>(culprit);
    const auto& outcome = outcomes_[at];
    const std::string& why = outcome.brief.empty() ? failure.message() : outcome.brief;
    for (const auto& scope : scopes_) {
      if (scope != scopes_[at]) scope->end_after(*scopes_[at], why);
    }
    scopes_[at]->fail(why, outcome.earlier);
  }

  std::vector<std::shared_ptr<World>> scopes_;
  std::vector<RankOutcome> outcomes_;  // each written by its rank's thread
  // For ranks that still wait for others to join.
  std::shared_ptr<Interruption> interruption_ = std::make_shared<Interruption>();
  std::shared_future<Status> result_;
  std::thread thread_;  // runs until the ranks have ended
};

/// Set before main, by the initialisers of the program's objects.
ProcessSpawner process_spawner = nullptr;

}  // namespace

void set_process_spawner(ProcessSpawner spawner) { process_spawner = spawner; }

std::unique_ptr<SpawnContext> spawn_ranks(std::function<void(int)> body,
                                          const SpawnOptions& options) {
  if (options.nprocs < 1)
    invalid("spawn: nprocs is " + std::to_string(options.nprocs) + "; at least one rank is needed");
  std::unique_ptr<SpawnContext> context;
  if (options.mode == SpawnMode::threads) {
    context = std::make_unique<ThreadContext>(std::move(body), options.nprocs);
  } else {
    if (process_spawner == nullptr)
      invalid(
          "spawn: this program links no part of muster that starts processes (muster::spawn); "
          "SpawnMode::threads needs none");
    const auto child = [body = std::move(body)](int rank) {
      const auto scope = World::hold_current();
      scope->drop();  // the parent's groups
      auto outcome = run_rank(body, rank);
      if (!outcome.status.ok()) scope->fail(outcome.brief, outcome.earlier);
      scope->drop();
      return std::move(outcome.status);
    };
    context = process_spawner(options.nprocs, child, options.shutdown_timeout);
  }
  if (!options.join) return context;
  context->join();
  return nullptr;
}

}  // namespace muster::group
