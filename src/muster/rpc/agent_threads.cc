/// The agent's threads: the listener, the pool, and how they end.
#include <algorithm>
#include <thread>

#include "muster/base/log.h"
#include "muster/rpc/agent_closing.h"
#include "muster/rpc/agent_parts.h"
#include "muster/rpc/errors.h"
#include "muster/rpc/spare_memory.h"
#include "muster/wait/core_offer.h"
#include "muster/wait/spin_wait.h"

namespace muster::rpc {
namespace {

// How long the listener keeps away after it has seen a caller wait: callers that call again and
// again need the core, and the messages, alone.
constexpr Duration kStandBy = std::chrono::microseconds(250);

thread_local const Agent* agent_of_worker_thread = nullptr;

}  // namespace

bool Agent::wait(const std::function<bool()>& done, TimePoint deadline) {
  if (done()) return true;
  const Use use(*this);
  if (!use) return done();
  pollers_.fetch_add(1);
  poller_entries_.fetch_add(1, std::memory_order_relaxed);
  bool holds = false;
  CoreOffer offer(idle_polls_);
  const auto over = [&] {
    holds = done();
    if (!holds) {
      const bool moved = progress();
      holds = done();
      offer.polled(moved || holds);
    }
    return holds || state_.load(std::memory_order_relaxed) == State::stopped;
  };
  fabric_->wait(std::ref(over), deadline);
  // What is still to be read is for the listener, where no other caller waits.
  if (pollers_.fetch_sub(1) == 1 && dozing_.load()) {
    { const std::lock_guard lock(pool_mutex_); }
    listener_wanted_.notify_one();
  }
  return holds || done();
}

void Agent::wake() {
  const Use use(*this);
  if (use) fabric_->wake();
}

// ---- the listener
// ----------------------------------------------------------------------------------------------------

void Agent::listen() {
  const auto bound = options_.bind_thread ? options_.bind_thread() : nullptr;
  agent_of_worker_thread = this;
  const auto over = [this] { return state_.load() == State::stopped; };
  while (!over()) {
    if (pollers_.load() > 0) {
      stand_by();
      continue;
    }
    CoreOffer offer(idle_polls_);
    fabric_->wait(
        [&] {
          offer.polled(progress());
          return over() || pollers_.load(std::memory_order_relaxed) > 0;
        },
        TimePoint::max());
  }
}

/// A caller drives the fabric. It may be back in a microsecond, or wait for an hour.
void Agent::stand_by() {
  const auto over = [this] { return state_.load() == State::stopped; };
  auto entries = poller_entries_.load();
  std::unique_lock lock(pool_mutex_);
  for (;;) {
    listener_wanted_.wait_for(lock, kStandBy, over);
    if (over()) return;
    const auto now = poller_entries_.load();
    const bool waits = pollers_.load() > 0;
    if (now == entries && !waits) return;  // nobody has come for a while
    if (now == entries) {
      // One that waits for long: it says when it goes.
      dozing_.store(true);
      listener_wanted_.wait(lock, [&] { return over() || pollers_.load() == 0; });
      dozing_.store(false);
      return;
    }
    entries = now;
  }
}

// ---- the pool
// --------------------------------------------------------------------------------------------------------

bool Agent::run_later(std::function<void()> task) {
  {
    const std::lock_guard lock(pool_mutex_);
    if (state_.load() == State::stopped) return false;
    busy_.fetch_add(1);
    tasks_.push_back(std::move(task));
    const bool all_taken = static_cast<int>(tasks_.size()) > idle_workers_;
    if (all_taken && static_cast<int>(pool_.size()) < options_.num_worker_threads)
      pool_.emplace_back([this] { work(); });
  }
  pool_changed_.notify_one();
  return true;
}

void Agent::work() {
  const auto bound = options_.bind_thread ? options_.bind_thread() : nullptr;
  agent_of_worker_thread = this;
  std::unique_lock lock(pool_mutex_);
  for (;;) {
    ++idle_workers_;
    pool_changed_.wait(lock, [this] { return !tasks_.empty() || state_.load() == State::stopped; });
    --idle_workers_;
    if (tasks_.empty()) return;
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    try {
      task();
    } catch (...) {
      log(LogLevel::error, "worker '" + self().name() + "': a callback threw: " +
                               describe_exception(std::current_exception()).text);
    }
    task = nullptr;
    busy_.fetch_sub(1);
    lock.lock();
  }
}

// ---- the end
// ---------------------------------------------------------------------------------------------------------

/// Nothing of this worker is under way.
bool Agent::quiet() {
  if (busy_.load() > 0 || unanswered_.load() > 0 || outbound_count_.load() > 0 ||
      held_back_count_.load() > 0)
    return false;
  {
    const std::lock_guard lock(calls_mutex_);
    if (!calls_.empty()) return false;
  }
  const std::lock_guard lock(look_mutex_);
  return inbound_.empty();
}

void Agent::shut_down(Duration timeout) {
  if (timeout < Duration::zero())
    group::invalid("shutdown: a timeout must not be negative; zero is none");
  if (agent_of_worker_thread == this)
    group::invalid(
        "shutdown was called by a function that runs on this worker; call it from the worker's own "
        "thread");
  if (state_.load() != State::running) return stop();
  const auto deadline =
      timeout == Duration::zero() ? TimePoint::max() : deadline_after(clock(), timeout);
  Status status;
  try {
    status = closing_->run(deadline);
  } catch (...) {
    stop();
    throw;
  }
  stop();
  if (!status.ok()) group::raise(status);
}

void Agent::fail_all() {
  std::vector<Pending> failed;
  {
    const std::lock_guard lock(calls_mutex_);
    for (auto& [number, pending] : calls_) failed.push_back(std::move(pending));
    calls_.clear();
  }
  const Status over(Code::aborted, "RPC of worker '" + self().name() + "' has ended", {id_});
  for (auto& pending : failed) {
    Answer answer;
    answer.error = loss_error(pending.to, pending.name, over);
    pending.completion(std::move(answer));
  }
}

void Agent::stop() {
  if (agent_of_worker_thread == this) {
    // The last handle went with a task of its own: a thread cannot wait for itself.
    std::terminate();
  }
  const std::lock_guard one_ends(ending_mutex_);
  if (!fabric_) return;
  {
    const std::lock_guard lock(pool_mutex_);
    state_.store(State::stopped);
  }
  listener_wanted_.notify_all();
  pool_changed_.notify_all();
  fabric_->wake();
  if (listener_.joinable()) listener_.join();
  fail_all();
  // Whoever is inside sees the end and leaves; what it has begun meanwhile fails too.
  yield_until([this] {
    fabric_->wake();
    return users_.load() == 0;
  });
  fail_all();
  for (auto& thread : pool_) thread.join();
  {
    const std::lock_guard lock(serving_mutex_);
    held_back_.clear();
  }
  tasks_.clear();
  outbound_.clear();
  fabric_.reset();
  companions_.clear();
  options_.meeting_place.reset();
  drop_spare_memory();
}

}  // namespace muster::rpc
