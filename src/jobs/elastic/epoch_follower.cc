// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/elastic/epoch_follower.h"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <limits>
#include <thread>
#include <utility>

#include "core/base/environment.h"
#include "core/base/log/log.h"
#include "core/base/process/launcher_socket.h"
#include "core/base/threads/thread_start.h"
#include "core/group/epoch.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "core/group/world.h"
#include "core/wait/callbacks.h"
#include "jobs/elastic/state_commits.h"
#include "muster/collectives.h"

namespace muster::elastic {
namespace {

constexpr Duration kCommitsToldEvery =
    std::chrono::milliseconds(100);                        // limit: each wakes the launcher
constexpr Duration kStoodStill = std::chrono::seconds(1);  // limit: so late no thread is that runs

std::int64_t number_in(const char* name, std::int64_t otherwise) {
  const auto value = env_integer(name, 0, std::numeric_limits<std::int64_t>::max());
  group::check(value.status());
  return value->value_or(otherwise);
}

/// A failure that another rank's end, or the end of an epoch, may be behind.
bool comes_of_an_end(Code code) {
  switch (code) {
    case Code::peer_failed:
    case Code::network:
    case Code::aborted:
    case Code::refused:
    case Code::closed:
    case Code::store: return true;
    default: return false;
  }
}

/// The status of a DistError; other exceptions have one of Code::ok.
Status status_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const DistError& error) {
    return {error.code(), error.what(), error.ranks()};
  } catch (...) {
    return {};
  }
}

std::string lost_text(std::int64_t commits, std::int64_t kept) {
  const std::string made = "of its " + std::to_string(commits) + " commits or more";
  const std::string last = "after commit " + std::to_string(kept);
  if (kept == 0) return "the state of the job is lost: no rank has any " + made;
  if (commits > kept) return "commits of the job are lost: " + made + " no rank has one " + last;
  return "commits of the job may be lost: no rank knows whether others made any " + last;
}

}  // namespace

EpochFollower& EpochFollower::of_process() {
  static EpochFollower& follower = *new EpochFollower();
  return follower;
}

EpochFollower::EpochFollower() {
  const std::int64_t descriptor = number_in(kLauncherSocketVariable, -1);
  first_ = number_in("MUSTER_EPOCH", 0);
  nodes_ = static_cast<int>(number_in("GROUP_WORLD_SIZE", 1));
  node_ = static_cast<int>(number_in("GROUP_RANK", 0));
  committed_ = number_in("MUSTER_COMMITTED", 0);
  state_in_ = number_in("MUSTER_STATE_EPOCH", 0);
  fails_without_state_ = env_text("MUSTER_ON_LOST_STATE").value_or("") == "fail";
  is_spare_ = env_text(launch::kSpareVariable).has_value();
  const int channel = static_cast<int>(descriptor);
  if (!is_launcher_socket(channel)) return;  // a child of the worker, which has none
  // The worker's children have another launcher, or none.
  keep_launcher_socket_from_programs();
  ::unsetenv(kLauncherSocketVariable);
  channel_ = channel;
  group::check(CallbackExecutor::of_process().prepare());  // aborts must not wait for a thread
  // Memory that the launcher holds for this place was sent before the process was started.
  while (launch::has_worker_notice(channel_) && read_one()) {
  }
  auto thread = start_thread("the thread that reads the launcher's notices", [this] { read(); });
  group::check(thread.status());
  thread->detach();
}

// A call that waits for a rank that has ended, or for one that has heard of it, ends now.
void EpochFollower::read() {
  while (read_one()) {
  }
}

/// False: there will be no more.
bool EpochFollower::read_one() {
  std::vector<Descriptor> memories;
  auto notice = launch::read_worker_notice(channel_, memories);
  std::shared_ptr<World> world;
  std::vector<Group> ended;
  std::shared_ptr<Interruption> meeting;
  std::string reason;
  bool goes_on = false, gives = false;
  {
    const std::lock_guard lock(mutex_);
    if (!notice) {
      orphaned_ = true;
    } else if (notice->kind == launch::WorkerNoticeKind::leave) {
      leaving_ = true;
    } else if (notice->kind == launch::WorkerNoticeKind::memories) {
      std::ranges::move(memories, std::back_inserter(memories_));
    } else {
      gives = left_out_ = notice->kind == launch::WorkerNoticeKind::hand_over;
      if (joined_ > 0 && (gives || notice->epoch > joined_)) {
        // Listed under the lock, so none of them is of the next epoch: `try_epoch` begins that
        // under the lock as well.
        world = world_;
        ended = world->groups();
        meeting = meeting_;
        reason = "epoch " + std::to_string(joined_) + " of the job is over: " + notice->reason;
      }
      if (!gives) latest_ = std::move(*notice);
    }
    changed_.notify_all();
    goes_on = !orphaned_;
  }
  if (gives) hand_over();
  if (meeting) meeting->raise(reason);
  // An abort calls hooks of the user's, which may take any time and ask this follower. So no lock
  // is held, and the thread that reads notices does not wait for them.
  if (!ended.empty())
    CallbackExecutor::of_process().run([world, groups = std::move(ended), reason] {
      const WorldScope::Binding bound(world);
      abort_groups(groups, reason);
    });
  return goes_on;
}

/// The launcher ends this process once it has the answer.
void EpochFollower::hand_over() const {
  const std::lock_guard lock(keeper_mutex_);
  const auto copied = [this]() -> std::optional<CommitMemory> {
    try {
      if (keeper_ != nullptr) return keeper_->hand_over();
    } catch (const std::exception& error) {
      log(LogLevel::warning,
          std::string("the last commit of this process ends with it: ") + error.what());
    }
    return std::nullopt;
  };
  const auto copy = copied();
  const Status given = launch::hand_over(channel_, copy ? copy->descriptor() : -1);
  if (!given && given.code() != Code::closed)
    log(LogLevel::warning, "the last commit of this process ends with it: " + given.message());
}

void EpochFollower::set_keeper(CommitKeeper* keeper) {
  const std::lock_guard lock(keeper_mutex_);
  keeper_ = keeper;
}

void EpochFollower::forget_keeper(const CommitKeeper* keeper) {
  const std::lock_guard lock(keeper_mutex_);
  if (keeper_ == keeper) keeper_ = nullptr;
}

std::int64_t EpochFollower::committed_before() const {
  const std::lock_guard lock(mutex_);
  return entered_ ? entered_->committed : committed_;
}

std::int64_t EpochFollower::state_before() const {
  const std::lock_guard lock(mutex_);
  return entered_ ? entered_->state_in : state_in_;
}

void EpochFollower::note_state(std::int64_t commits, bool divided) {
  if (channel_ < 0) return;
  const launch::HeldState now{epoch(), divided};
  if (std::exchange(state_told_, now) != now) launch::tell_state(channel_, now, commits);
}

void EpochFollower::note_commit(std::int64_t number) {
  if (channel_ < 0) return;
  const TimePoint now = steady_clock().now();
  if (now - committed_at_ < kCommitsToldEvery) return;
  committed_at_ = now;
  launch::tell_committed(channel_, number);
}

void EpochFollower::note_lost_state(std::int64_t commits, std::int64_t kept) const {
  if (channel_ >= 0) launch::tell_lost(channel_, commits, kept);
  const std::string text = lost_text(commits, kept);
  if (fails_without_state_)
    throw DistError(text + ", and --on-lost-state is fail", Code::exhausted);
  log(LogLevel::warning,
      text + (kept > 0 ? "; training goes on from that one"
                       : "; training begins again with what the program has loaded itself"));
}

int EpochFollower::node() const {
  const std::lock_guard lock(mutex_);
  return entered_ ? entered_->ranks.group_rank : node_;
}

std::vector<Descriptor> EpochFollower::take_memories() {
  const std::lock_guard lock(mutex_);
  return std::exchange(memories_, {});
}

void EpochFollower::give_memories(std::span<const int> memories) const {
  if (channel_ >= 0) group::check(launch::give_memories(channel_, memories));
}

bool EpochFollower::leaving() const {
  const std::lock_guard lock(mutex_);
  return leaving_;
}

bool EpochFollower::is_only_node() const {
  const std::lock_guard lock(mutex_);
  return (entered_ ? entered_->ranks.group_world_size : nodes_) == 1;
}

std::int64_t EpochFollower::epoch() const {
  const std::lock_guard lock(mutex_);
  return joined_;
}

std::optional<launch::WorkerNotice> EpochFollower::entered() const {
  const std::lock_guard lock(mutex_);
  return entered_;
}

/// Whether the present epoch is over by the launcher's word.
bool EpochFollower::is_announced() const {
  const std::lock_guard lock(mutex_);
  return leaving_ || left_out_ || orphaned_ || (latest_ && latest_->epoch > joined_);
}

bool EpochFollower::epoch_is_over(const Status& failure) const {
  if (channel_ < 0) return false;
  // A commit is lost or has no room: training that went on would have a mixed state.
  if (failure.code() == Code::exhausted) return false;
  if (is_announced()) return true;
  const Status of_group = is_initialized() ? default_group()->failure() : Status();
  // A group that waited in vain for a rank may have waited for one that stands still.
  const bool over = of_group
                        ? comes_of_an_end(failure.code())
                        : comes_of_an_end(of_group.code()) || of_group.code() == Code::timed_out;
  if (over) tell_trouble(of_group ? failure : of_group);
  return over;
}

void EpochFollower::tell_trouble(const Status& failure) const {
  if (is_announced()) return;
  launch::tell_trouble(channel_, {epoch(), failure.ranks(), failure.message()});
}

void EpochFollower::note_ending() const {
  if (channel_ >= 0) launch::tell_ending(channel_, epoch());
}

void EpochFollower::drop_group() { World::hold_current()->drop(); }

void EpochFollower::end_group(RunOutcome outcome) {
  if (outcome == RunOutcome::preempted && !is_only_node()) return drop_group();
  if (outcome == RunOutcome::finished) {
    trained_ = true;
    if (channel_ >= 0) launch::tell_trained(channel_);
  }
  try {
    destroy_process_group();
  } catch (const DistError& error) {
    log(LogLevel::info, std::string("a rank ended before the group was closed: ") + error.what());
  }
}

/// False: another epoch has come meanwhile.
bool EpochFollower::try_epoch(const ElasticOptions& options, std::int64_t epoch,
                              const std::optional<launch::WorkerNotice>& notice) {
  const auto meeting = std::make_shared<Interruption>();
  {
    const std::lock_guard lock(mutex_);
    if (latest_ && latest_->epoch > epoch) return false;
    world_ = World::hold_current();
    joined_ = epoch;
    entered_ = notice;
    meeting_ = meeting;
  }
  InitProcessGroupOptions group = options.group;
  if (notice) {
    group.rank = notice->ranks.rank;
    group.world_size = notice->ranks.world_size;
  }
  try {
    const Interruption::InterruptionBinding waits(meeting);
    group::init_at_epoch(group, {epoch, notice ? notice->agent_store : std::string()});
  } catch (const DistError& error) {
    const Status failure(error.code(), error.what(), error.ranks());
    // Ranks that did not come in time may stand still.
    if (error.code() == Code::timed_out && channel_ >= 0)
      tell_trouble(failure);
    else if (!epoch_is_over(failure))
      throw;
    log(LogLevel::info, "epoch " + std::to_string(epoch) + " of the job ended while its ranks met");
    return false;
  }
  const std::lock_guard lock(mutex_);
  return !latest_ || latest_->epoch <= epoch;
}

bool EpochFollower::wait(std::unique_lock<std::mutex>& lock, TimePoint deadline,
                         const std::function<bool()>& ready) {
  while (!ready()) {
    group::check(Interruption::of_thread());
    const TimePoint now = steady_clock().now();
    if (now >= deadline) return false;
    const TimePoint wake =
        std::min(deadline, deadline_after(steady_clock(), Interruption::look_every()));
    changed_.wait_until(lock, wake);
    // This process stood still, and the thread that reads may have a notice from meanwhile.
    if (wake != TimePoint::max() && steady_clock().now() - wake > kStoodStill)
      deadline = std::max(deadline, deadline_after(steady_clock(), kStoodStill));
  }
  return true;
}

bool EpochFollower::join(const ElasticOptions& options, const std::exception_ptr& failure) {
  if (channel_ < 0) {
    if (!is_initialized()) init_process_group(options.group);
    return true;
  }
  if (trained_)
    throw DistError(
        "elastic::run was called again after it had finished; it trains once in a process, so put "
        "all phases of training into one call",
        Code::invalid_argument);
  const TimePoint deadline = deadline_after(steady_clock(), options.repair_timeout);
  for (bool first = joined_ == 0;; first = false) {
    std::optional<launch::WorkerNotice> notice;
    std::int64_t epoch = 0;
    {
      std::unique_lock lock(mutex_);
      const auto ready = [&] {
        // Nothing comes after the notice that this node is left out but its end.
        if (left_out_) return orphaned_;
        return leaving_ || orphaned_ || (latest_ && latest_->epoch > joined_) ||
               (first && !is_spare_);
      };
      // A spare waits for as long as the job lives, and a process that is left out for its end.
      const bool stays = left_out_ || (is_spare_ && joined_ == 0);
      if (!wait(lock, stays ? TimePoint::max() : deadline, ready) && failure)
        std::rethrow_exception(failure);
      if (leaving_) return false;
      if (orphaned_)
        throw DistError("the launcher of this process has ended, and no other repairs the job",
                        Code::closed);
      if (latest_ && latest_->epoch > joined_) {
        notice = latest_;
        epoch = latest_->epoch;
      } else if (first) {
        epoch = first_;
      } else {
        throw DistError(
            "no further epoch of the job came within " + describe(options.repair_timeout),
            Code::timed_out);
      }
    }
    if (first && !notice && is_initialized()) {
      const std::lock_guard lock(mutex_);
      world_ = World::hold_current();
      joined_ = epoch;
      return true;
    }
    if (is_initialized()) drop_group();
    if (try_epoch(options, epoch, notice)) return true;
    drop_group();
  }
}

namespace {

/// One epoch. Nothing: it has ended early, and `failure` says why.
std::optional<RunOutcome> run_epoch(StateCommits& commits, const std::function<void()>& train,
                                    EpochFollower& follower, std::exception_ptr& failure) {
  try {
    commits.from_survivors();
    train();
    // From here on all have come to the end, and no rank's death undoes it.
    commits.agree_on_end();
    return RunOutcome::finished;
  } catch (const Preempted&) {
    return RunOutcome::preempted;
  } catch (...) {
    failure = std::current_exception();
    if (!follower.epoch_is_over(status_of(failure))) throw;
    return std::nullopt;
  }
}

RunOutcome run_epochs(EpochFollower& follower, State& state, const std::function<void()>& train,
                      const ElasticOptions& options) {
  StateCommits& commits = StateSync::commits_of(state);
  for (std::exception_ptr failure; follower.join(options, failure);) {
    failure = nullptr;
    if (const auto outcome = run_epoch(commits, train, follower, failure)) {
      follower.end_group(*outcome);
      return *outcome;
    }
    follower.drop_group();
  }
  if (is_initialized()) follower.drop_group();
  commits.before_leaving();
  return RunOutcome::preempted;
}

}  // namespace

RunOutcome run(State& state, const std::function<void()>& train, const ElasticOptions& options) {
  EpochFollower& follower = EpochFollower::of_process();
  try {
    return run_epochs(follower, state, train, options);
  } catch (...) {
    // Exit handlers may take long, and the others have noticed by now that the group has failed.
    follower.note_ending();
    throw;
  }
}

std::int64_t epoch() { return EpochFollower::of_process().epoch(); }

}  // namespace muster::elastic
