// SPDX-License-Identifier: BSD-3-Clause
#include "backends/carried/poller.h"

#include <algorithm>

#include "core/base/threads/thread_start.h"
#include "core/tunables/tunables.h"
#include "core/wait/callbacks.h"

namespace muster::carried {

CarriedPoller& CarriedPoller::of_process() {
  static auto* const poller = new CarriedPoller;
  return *poller;
}

Status CarriedPoller::prepare() {
  const std::lock_guard guard(lock_);
  if (running_) return {};
  auto thread = start_thread("the thread that polls MPI", [this] { run(); });
  if (!thread.ok()) return thread.status();
  thread->detach();
  running_ = true;
  return {};
}

void CarriedPoller::watch(std::shared_ptr<collective::Progressable> work) {
  {
    const std::lock_guard guard(lock_);
    if (std::find(work_.begin(), work_.end(), work) != work_.end()) return;
    work_.push_back(std::move(work));
  }
  changed_.notify_one();
}

void CarriedPoller::forget(const collective::Progressable& work) {
  std::vector<std::shared_ptr<collective::Progressable>> forgotten;  // dropped without the lock
  std::unique_lock guard(lock_);
  for (auto& item : work_)
    if (item.get() == &work) forgotten.push_back(std::move(item));
  std::erase(work_, nullptr);
  passed_.wait(guard, [this, pass = passes_] { return !in_pass_ || passes_ != pass; });
}

void CarriedPoller::run() {
  CallbackExecutor::spare_this_thread();
  std::vector<std::shared_ptr<collective::Progressable>> batch, finished;
  std::unique_lock guard(lock_);
  for (;;) {
    changed_.wait(guard, [this] { return !work_.empty(); });
    batch = work_;
    in_pass_ = true;
    guard.unlock();
    for (const auto& item : batch) {
      if (!item->has_driver()) {
        item->advance();
        item->check_deadlines(item->fabric()->clock().now());
      }
      if (!item->busy()) finished.push_back(item);
    }
    guard.lock();
    std::erase_if(work_, [&](const auto& item) {
      return !item->busy() && std::find(finished.begin(), finished.end(), item) != finished.end();
    });
    guard.unlock();  // what is dropped may take locks of its own
    batch.clear();
    finished.clear();
    guard.lock();
    in_pass_ = false;
    ++passes_;
    passed_.notify_all();
    if (!work_.empty()) changed_.wait_for(guard, tunables().mpi_poll);
  }
}

}  // namespace muster::carried
