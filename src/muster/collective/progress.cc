#include "muster/collective/progress.h"

#include <algorithm>
#include <new>

#include "muster/base/callback_executor.h"
#include "muster/base/thread_start.h"
#include "muster/base/tunables.h"

namespace muster::collective {
// Outlives the handle if this thread drops the last owner of the handle.
struct Progress::Shared {
  std::mutex lock;
  std::condition_variable changed;
  std::vector<std::shared_ptr<Progressable>> work;
  std::size_t entered = 0;  // `work` has room for this many
  std::atomic<bool> kicked{false};
  std::atomic<transport::Fabric*> sleeping_in{nullptr};
  bool drowsy = false;  // may take longer than a tick to check again
  bool stop = false;
  // A pass over a batch, which owns its elements.
  bool driving = false;
  std::uint64_t passes = 0;
  std::condition_variable passed;
  std::thread::id thread;
  std::vector<std::shared_ptr<Progressable>> batch, finished;  // used by the thread only

  void run();
  void kick();
  void nap(std::unique_lock<std::mutex>& guard, int& idle_ticks);
  void drive();
  void check_deadlines(TimePoint limit);
  TimePoint next_deadline() const;
  template <class Visit>
  void visit(std::unique_lock<std::mutex>& guard, Visit visit);
};

/// Under the lock.
void Progress::Shared::kick() {
  kicked.store(true);
  if (transport::Fabric* fabric = sleeping_in.load()) fabric->wake();
}

void Progress::Shared::nap(std::unique_lock<std::mutex>& guard, int& idle_ticks) {
  if (idle_ticks++ < tunables().progress_linger / tunables().progress_tick) {
    const bool modest =
        !work.empty() && std::all_of(work.begin(), work.end(), [](const auto& driven) {
          return driven->is_polled_between_compute();
        });
    changed.wait_for(guard, modest ? tunables().driver_trust : tunables().progress_tick);
    return;
  }
  drowsy = true;
  if (work.empty()) {
    changed.wait(guard, [&] { return stop || kicked.load(); });
    idle_ticks = 0;
  } else {
    changed.wait_for(guard,
                     tunables().progress_idle_tick);  // every object has a driver, which may leave
                                                      // without notice once it is done
  }
  drowsy = false;
}

/// For the batch.
TimePoint Progress::Shared::next_deadline() const {
  TimePoint earliest = TimePoint::max();
  for (const auto& driven : batch) earliest = std::min(earliest, driven->next_deadline());
  return earliest;
}

/// If `limit`, the earliest deadline of the batch, has passed.
void Progress::Shared::check_deadlines(TimePoint limit) {
  const TimePoint now = batch.front()->fabric()->clock().now();
  if (now < limit) return;
  for (const auto& driven : batch) driven->check_deadlines(now);
}

void Progress::Shared::drive() {
  const std::shared_ptr<transport::Fabric> fabric = batch.front()->fabric();
  const TimePoint limit = next_deadline();
  const auto pass = [&] {
    bool unattended = false;
    for (const auto& driven : batch) {
      if (driven->has_driver()) continue;
      driven->advance();
      if (!driven->busy()) return true;
      unattended = true;
    }
    return !unattended || kicked.load();
  };
  sleeping_in.store(fabric.get());
  fabric->wait(pass, limit);
  sleeping_in.store(nullptr);
  check_deadlines(limit);  // even if there was news: one group's news may never stop
}

/// Calls `visit()` without the lock, with all watched objects as the batch, then releases those
/// that are done.
template <class Visit>
void Progress::Shared::visit(std::unique_lock<std::mutex>& guard, Visit visit) {
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
  std::erase_if(work, [&](const auto& driven) {
    const auto known =
        std::find(batch.begin(), batch.end(), driven);  // later additions are checked next time
    if (known == batch.end() || driven->busy()) return false;
    finished.push_back(driven);
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

void Progress::Shared::run() {
  int idle_ticks = 0;
  CallbackExecutor::spare_this_thread();
  std::unique_lock guard(lock);
  thread = std::this_thread::get_id();
  while (!stop) {
    kicked.store(false);
    const bool any = std::any_of(work.begin(), work.end(),
                                 [](const auto& driven) { return !driven->has_driver(); });
    if (!any) {
      nap(guard, idle_ticks);
      // A thread that drives between its own work does not check deadlines.
      if (stop || work.empty()) continue;
      visit(guard, [this] { check_deadlines(next_deadline()); });
      continue;
    }
    idle_ticks = 0;
    visit(guard, [this] { drive(); });
  }
}

Progress::Progress() : shared_(std::make_shared<Shared>()) {}

Progress::~Progress() {
  {
    const std::lock_guard guard(shared_->lock);
    shared_->stop = true;
    shared_->kicked.store(true);
  }
  shared_->changed.notify_all();
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void Progress::enter() {
  const std::lock_guard guard(shared_->lock);
  shared_->work.reserve(shared_->entered + 1);
  ++shared_->entered;
}

void Progress::leave() {
  const std::lock_guard guard(shared_->lock);
  --shared_->entered;
}

Status Progress::prepare() {
  if (running_.load(std::memory_order_acquire)) return {};
  const std::lock_guard guard(starting_);
  if (running_.load()) return {};
  auto thread = start_thread(
      "the thread that advances what was started", [shared = shared_] { shared->run(); },
      Signals::inherited);
  if (!thread.ok()) return thread.status();
  thread_ = std::move(*thread);
  running_.store(true, std::memory_order_release);
  return {};
}

void Progress::watch(std::shared_ptr<Progressable> work, bool soon) noexcept {
  if (!running_.load(std::memory_order_acquire)) return;
  bool wake = soon;
  {
    const std::lock_guard guard(shared_->lock);
    if (std::find(shared_->work.begin(), shared_->work.end(), work) == shared_->work.end())
      shared_->work.push_back(std::move(work));
    wake = wake || shared_->drowsy;
  }
  if (wake) notify();
}

void Progress::forget(const Progressable& work) {
  std::vector<std::shared_ptr<Progressable>> forgotten;  // destroyed after the lock is released
  std::unique_lock guard(shared_->lock);
  for (auto& driven : shared_->work) {
    if (driven.get() == &work) forgotten.push_back(std::move(driven));
  }
  std::erase(shared_->work, nullptr);
  if (!shared_->driving || shared_->thread == std::this_thread::get_id()) return;
  shared_->kick();
  shared_->passed.wait(guard, [this, pass = shared_->passes] {
    return !shared_->driving || shared_->passes != pass;
  });
}

void Progress::notify() {
  {
    const std::lock_guard guard(shared_->lock);
    shared_->kick();
  }
  shared_->changed.notify_one();
}

}  // namespace muster::collective
