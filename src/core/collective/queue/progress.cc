// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/queue/progress.h"

#include <algorithm>
#include <new>

#include "core/base/threads/thread_start.h"
#include "core/tunables/tunables.h"
#include "core/wait/callbacks.h"

namespace muster::collective {
// Outlives the handle if this thread drops the last owner of the handle.
struct Progress::State {
  // Guards all below but the atomics and the last line. The thread releases it while it drives and
  // while it destroys objects; communicators only read atomics under it.
  std::mutex lock;
  std::condition_variable changed;
  std::vector<std::shared_ptr<Progressable>> work;
  std::size_t entered = 0;  // `work` has room for this many, so `watch` allocates nothing
  // `kick` sets `kicked`, then reads `sleeping_in`; `drive` does the opposite, in sequentially
  // consistent order, so a kick either ends the wait or is seen before it.
  std::atomic<bool> kicked{false};
  // Set without the lock. The fabric stays alive while a `kick` uses it: the thread takes the lock
  // once more before it lets go of the batch that owns it.
  std::atomic<transport::Fabric*> sleeping_in{nullptr};
  bool sleeps_long = false;  // may take longer than a tick to check again
  bool stop = false;
  // A pass over a batch, which owns its elements.
  bool driving = false;
  std::uint64_t passes = 0;
  std::condition_variable passed;
  std::thread::id thread;
  std::vector<std::shared_ptr<Progressable>> batch, finished;  // used by the thread only

  void run();
  void kick();
  void wait_idle(std::unique_lock<std::mutex>& guard, int& idle_ticks);
  void drive();
  void check_deadlines(TimePoint limit);
  TimePoint next_deadline() const;
  template <class Visit>
  void visit(std::unique_lock<std::mutex>& guard, Visit visit);
};

/// Under the lock.
void Progress::State::kick() {
  kicked.store(true);
  if (transport::Fabric* fabric = sleeping_in.load()) fabric->wake();
}

void Progress::State::wait_idle(std::unique_lock<std::mutex>& guard, int& idle_ticks) {
  if (idle_ticks++ < tunables().progress_linger / tunables().progress_tick) {
    const bool all_polled =
        !work.empty() && std::all_of(work.begin(), work.end(), [](const auto& item) {
          return item->is_polled_between_compute();
        });
    changed.wait_for(guard, all_polled ? tunables().driver_trust : tunables().progress_tick);
    return;
  }
  sleeps_long = true;
  if (work.empty()) {
    changed.wait(guard, [&] { return stop || kicked.load(); });
    idle_ticks = 0;
  } else {
    changed.wait_for(guard,
                     tunables().progress_idle_tick);  // every object has a driver, which may leave
                                                      // without notice once it is done
  }
  sleeps_long = false;
}

/// For the batch.
TimePoint Progress::State::next_deadline() const {
  TimePoint earliest = TimePoint::max();
  for (const auto& item : batch) earliest = std::min(earliest, item->next_deadline());
  return earliest;
}

/// If `limit`, the earliest deadline of the batch, has passed.
void Progress::State::check_deadlines(TimePoint limit) {
  const TimePoint now = batch.front()->fabric()->clock().now();
  if (now < limit) return;
  for (const auto& item : batch) item->check_deadlines(now);
}

void Progress::State::drive() {
  const std::shared_ptr<transport::Fabric> fabric = batch.front()->fabric();
  const TimePoint limit = next_deadline();
  const auto pass = [&] {
    bool undriven = false;
    for (const auto& item : batch) {
      if (item->has_driver()) continue;
      item->advance();
      if (!item->busy()) return true;
      undriven = true;
    }
    return !undriven || kicked.load();
  };
  sleeping_in.store(fabric.get());
  fabric->wait(pass, limit);
  sleeping_in.store(nullptr);
  check_deadlines(limit);  // even if there was news: one group's news may never stop
}

/// Calls `visit()` without the lock, with all watched objects as the batch, then releases those
/// that are done.
template <class Visit>
void Progress::State::visit(std::unique_lock<std::mutex>& guard, Visit visit) {
  try {
    batch = work;
    finished.reserve(work.size());
  } catch (const std::bad_alloc&) {  // retry later; no waiting thread depends on this
    batch.clear();
    changed.wait_for(guard, tunables().progress_tick);
    return;
  }
  driving = true;
  guard.unlock();
  visit();
  guard.lock();
  std::erase_if(work, [&](const auto& item) {
    const auto in_batch =
        std::find(batch.begin(), batch.end(), item);  // later additions are checked next time
    if (in_batch == batch.end() || item->busy()) return false;
    finished.push_back(item);
    return true;
  });
  guard.unlock();
  finished.clear();  // may drop the last owner of a communicator, and with it this thread's handle
  batch.clear();
  guard.lock();
  driving = false;
  ++passes;
  passed.notify_all();
}

void Progress::State::run() {
  int idle_ticks = 0;
  CallbackExecutor::spare_this_thread();
  std::unique_lock guard(lock);
  thread = std::this_thread::get_id();
  while (!stop) {
    kicked.store(false);  // before it looks at the work, so that a later kick counts
    const bool needs_driving =
        std::any_of(work.begin(), work.end(), [](const auto& item) { return !item->has_driver(); });
    if (!needs_driving) {
      wait_idle(guard, idle_ticks);
      // A thread that drives between its own work does not check deadlines.
      if (stop || work.empty()) continue;
      visit(guard, [this] { check_deadlines(next_deadline()); });
      continue;
    }
    idle_ticks = 0;
    visit(guard, [this] { drive(); });
  }
}

Progress::Progress() : state_(std::make_shared<State>()) {}

Progress::~Progress() {
  {
    const std::lock_guard guard(state_->lock);
    state_->stop = true;
    state_->kicked.store(true);
  }
  state_->changed.notify_all();
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void Progress::enter() {
  const std::lock_guard guard(state_->lock);
  state_->work.reserve(state_->entered + 1);
  ++state_->entered;
}

void Progress::leave() {
  const std::lock_guard guard(state_->lock);
  --state_->entered;
}

Status Progress::prepare() {
  if (running_.load(std::memory_order_acquire)) return {};
  const std::lock_guard guard(starting_);
  if (running_.load()) return {};
  auto thread = start_thread("the progress thread", [state = state_] { state->run(); });
  if (!thread.ok()) return thread.status();
  thread_ = std::move(*thread);
  running_.store(true, std::memory_order_release);
  return {};
}

void Progress::watch(std::shared_ptr<Progressable> work, bool soon) noexcept {
  if (!running_.load(std::memory_order_acquire)) return;
  bool wake = soon;
  {
    const std::lock_guard guard(state_->lock);
    wake = wake || state_->sleeps_long;
    if (std::find(state_->work.begin(), state_->work.end(), work) == state_->work.end()) {
      state_->work.push_back(std::move(work));
      wake = wake || state_->driving;  // a batch without this one, whose calls may never end
    }
  }
  if (wake) notify();
}

void Progress::forget(const Progressable& work) {
  std::vector<std::shared_ptr<Progressable>> forgotten;  // destroyed after the lock is released
  std::unique_lock guard(state_->lock);
  for (auto& item : state_->work) {
    if (item.get() == &work) forgotten.push_back(std::move(item));
  }
  std::erase(state_->work, nullptr);
  if (!state_->driving || state_->thread == std::this_thread::get_id()) return;
  state_->kick();
  state_->passed.wait(
      guard, [this, pass = state_->passes] { return !state_->driving || state_->passes != pass; });
}

void Progress::notify() {
  {
    const std::lock_guard guard(state_->lock);
    state_->kick();
  }
  state_->changed.notify_one();
}

}  // namespace muster::collective
