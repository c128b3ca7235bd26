#include "core/wait/callbacks/callback_lane.h"

#include <optional>
#include <utility>

#include "core/tunables/tunables.h"
#include "core/wait/callbacks/thread_rest.h"

namespace muster {
/// A thread that takes jobs, one after another.
struct CallbackLane::Runner {
  std::atomic<int> busy{0};
  std::optional<ThreadRest> rest;          // once it has begun; under the lane's lock
  std::shared_ptr<CallbackLane> children;  // of the job that runs: its own thread's
  TimePoint began{};                       // the job that runs; under the lane's lock

  bool stands_still(TimePoint now) {
    return rest && busy.load() == 0 &&
           rest->stands_still(now, began, tunables().callback_standstill);
  }
};

thread_local constinit const std::shared_ptr<CallbackLane::Runner>* CallbackLane::of_thread =
    nullptr;

CallbackLane::Busy::Busy() : runner_(of_thread != nullptr ? *of_thread : nullptr) {
  if (runner_) runner_->busy.fetch_add(1);
}
CallbackLane::Busy::~Busy() {
  if (runner_) runner_->busy.fetch_sub(1);
}

std::shared_ptr<CallbackLane> CallbackLane::of_this_job() {
  if (of_thread == nullptr) return nullptr;
  auto& children = (*of_thread)->children;
  if (!children) children = std::make_shared<CallbackLane>();
  return children;
}

/// Under the lock.
void CallbackLane::begin() {
  runner_ = std::make_shared<Runner>();
  CallbackExecutor::of_process().run(
      [self = shared_from_this(), me = runner_] { self->serve(me); });
}

void CallbackLane::run(CallbackExecutor::Job job) {
  bool watch = false;
  {
    const std::lock_guard guard(lock_);
    waiting_.push_back(std::move(job));
    if (!runner_) return begin();
    watch = !std::exchange(is_watched_, true);
  }
  if (watch) CallbackExecutor::of_process().watch(shared_from_this());
}

void CallbackLane::serve(const std::shared_ptr<Runner>& me) {
  of_thread = &me;
  std::unique_lock guard(lock_);
  me->rest.emplace(ThreadRest::this_thread());
  while (runner_ == me && !waiting_.empty()) {
    auto job = std::move(waiting_.front());
    waiting_.pop_front();
    me->began = steady_clock().now();
    guard.unlock();
    run_callback(job);
    job = nullptr;
    me->children = nullptr;
    guard.lock();
  }
  if (runner_ == me) runner_ = nullptr;
  of_thread = nullptr;
}

bool CallbackLane::look(TimePoint now) {
  const std::lock_guard guard(lock_);
  if (waiting_.empty() || !runner_) return is_watched_ = false;
  if (runner_->stands_still(now)) begin();
  return true;
}

bool CallbackLane::runs_on_this_thread() {
  const std::lock_guard guard(lock_);
  return of_thread != nullptr && *of_thread == runner_;
}

}  // namespace muster
