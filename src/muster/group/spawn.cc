#include "muster/group/spawn.h"

#include <future>
#include <mutex>

#include "muster/base/interruption.h"
#include "muster/group/world.h"
#include "muster/launch/spawn.h"
#include "muster/store/factory.h"

namespace muster::group {
namespace {

/// Runs one rank's body on `scope` and puts what it throws in words.
Status run_rank(const std::function<void(int)>& body, int rank, WorldScope& scope) {
  Status status;
  try {
    body(rank);
  } catch (const DistError& error) {
    status = Status(error.code(), error.what(), error.ranks());
  } catch (const std::exception& error) {
    status = Status(Code::internal, error.what(), {rank});
  } catch (...) {
    status = Status(Code::internal, "threw something that is no std::exception", {rank});
  }
  if (!status.ok()) scope.abort("rank " + std::to_string(rank) + " failed: " + status.message());
  scope.drop();
  return status;
}

class ProcessContext : public SpawnContext {
 public:
  explicit ProcessContext(launch::SpawnedProcesses processes) : processes_(std::move(processes)) {}
  bool join(std::optional<Duration> timeout) override {
    auto joined = processes_.join(timeout.value_or(Duration(-1)));
    if (!joined.ok()) throw SpawnError(joined.status());
    return *joined;
  }
  std::vector<pid_t> pids() const override { return processes_.pids(); }

 private:
  launch::SpawnedProcesses processes_;
};

class ThreadContext : public SpawnContext {
 public:
  ThreadContext(std::function<void(int)> body, int count) {
    const auto store = store::make_hash_store();
    for (int rank = 0; rank < count; ++rank) scopes_.push_back(std::make_shared<WorldScope>(Seat{store, rank, count}));
    result_ = std::async(std::launch::async, [this, body = std::move(body), count] {
      const auto rank_body = [&](int rank) {
        const auto& scope = scopes_[static_cast<std::size_t>(rank)];
        const WorldScope::Binding binding(scope);
        const Interruption::Binding waits(interruption_);
        return run_rank(body, rank, *scope);
      };
      return launch::spawn_threads(count, rank_body, [this](const Status& failure) {
        interruption_->raise(failure.message());
        for (const auto& scope : scopes_) scope->abort(failure.message());
      });
    });
  }
  bool join(std::optional<Duration> timeout) override {
    if (timeout && result_.wait_for(*timeout) != std::future_status::ready) return false;
    if (const auto status = result_.get(); !status.ok()) throw SpawnError(status);
    return true;
  }
  std::vector<pid_t> pids() const override { return {}; }

 private:
  std::vector<std::shared_ptr<WorldScope>> scopes_;
  std::shared_ptr<Interruption> interruption_ = std::make_shared<Interruption>();  // for those that still wait for the others to come
  std::shared_future<Status> result_;                                              // waits for the threads when it is destroyed
};

}  // namespace

std::unique_ptr<SpawnContext> spawn_ranks(std::function<void(int)> body, const SpawnOptions& options) {
  if (options.nprocs < 1) invalid("spawn: nprocs is " + std::to_string(options.nprocs) + "; at least one rank is needed");
  std::unique_ptr<SpawnContext> context;
  if (options.mode == SpawnMode::threads) {
    context = std::make_unique<ThreadContext>(std::move(body), options.nprocs);
  } else {
    launch::SpawnOptions engine;
    engine.shutdown_timeout = options.shutdown_timeout;
    const auto child = [body = std::move(body)](int rank) {
      const auto scope = WorldScope::current();
      scope->drop();  // what the parent had
      return run_rank(body, rank, *scope);
    };
    context = std::make_unique<ProcessContext>(take(launch::start_processes(options.nprocs, child, engine)));
  }
  if (!options.join) return context;
  context->join();
  return nullptr;
}

}  // namespace muster::group
