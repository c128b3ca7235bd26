#include "jobs/elastic/epoch_follower.h"
#include "jobs/elastic/state_sync.h"
#include "muster/collectives.h"

namespace muster::elastic {
namespace {

/// One epoch. Nothing: it has ended early, and `failure` says why.
std::optional<RunOutcome> run_epoch(State& state, const std::function<void()>& train,
                                    EpochFollower& follower, std::exception_ptr& failure) {
  try {
    StateSync::from_survivors(state);
    train();
    // From here on all have come to the end, and no rank's death undoes it.
    agree_on_commit(state.commits(), false);
    return RunOutcome::finished;
  } catch (const Preempted&) {
    return RunOutcome::preempted;
  } catch (...) {
    failure = std::current_exception();
    if (!follower.epoch_is_over(failure)) throw;
    return std::nullopt;
  }
}

}  // namespace

RunOutcome run(State& state, const std::function<void()>& train, const ElasticOptions& options) {
  EpochFollower& follower = EpochFollower::of_process();
  for (std::exception_ptr failure; follower.join(options, failure);) {
    failure = nullptr;
    if (const auto outcome = run_epoch(state, train, follower, failure)) {
      follower.end_group(*outcome);
      return *outcome;
    }
    follower.drop_group();
  }
  if (is_initialized()) follower.drop_group();
  StateSync::before_leaving(state);
  return RunOutcome::preempted;
}

std::int64_t epoch() { return EpochFollower::of_process().epoch(); }

}  // namespace muster::elastic
