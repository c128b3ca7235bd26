// SPDX-License-Identifier: BSD-3-Clause
#include "muster/rpc_future.h"

#include "muster/rpc_calls.h"
#include "rpc/agent/agent.h"

namespace muster::rpc {

bool FutureCore::wait_until(TimePoint deadline) const {
  if (done()) return true;
  if (const auto agent = agent_.lock()) {
    if (agent->wait([this] { return done(); }, deadline)) return true;
    if (agent->running()) return done();
  }
  // No agent drives this future; another thread of the process completes it.
  if (deadline == TimePoint::max()) {
    done_.wait(false, std::memory_order_acquire);
    return true;
  }
  std::unique_lock lock(mutex_);
  return completed_.wait_until(lock, deadline, [this] { return done(); });
}

void FutureCore::publish() {
  std::vector<std::function<void()>> callbacks;
  {
    const std::lock_guard lock(mutex_);
    done_.store(true, std::memory_order_release);
    callbacks.swap(callbacks_);
  }
  done_.notify_all();
  completed_.notify_all();
  const auto agent = agent_.lock();
  if (agent) agent->wake();
  for (auto& callback : callbacks) {
    if (!agent) {
      callback();
    } else {
      agent->run_callback([self = shared_from_this(), callback] { callback(); });
    }
  }
}

bool FutureCore::fail(std::exception_ptr error) {
  if (!claim()) return false;
  error_ = std::move(error);
  publish();
  return true;
}

void FutureCore::call_when_done(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (!done()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

std::weak_ptr<Agent> agent_of_thread() { return RpcScope::current()->agent(); }

}  // namespace muster::rpc
