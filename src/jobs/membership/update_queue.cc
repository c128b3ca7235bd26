// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/membership/update_queue.h"

namespace muster::membership {

Result<Update> UpdateQueue::next(Duration timeout) {
  std::unique_lock lock(mutex_);
  const auto ready = [&] { return closed_ || !updates_.empty() || !failure_.ok(); };
  const TimePoint deadline = deadline_after(steady_clock(), timeout);
  if (deadline == TimePoint::max())
    changed_.wait(lock, ready);
  else if (!changed_.wait_until(lock, deadline, ready))
    return Update{.revision = taken_};
  if (closed_) return Status(Code::aborted, "the watch was closed");
  if (updates_.empty()) return failure_;
  Update update = std::move(updates_.front());
  updates_.pop_front();
  taken_ = update.revision;
  return update;
}

void UpdateQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
}

bool UpdateQueue::closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

void UpdateQueue::push(Update update) {
  {
    const std::lock_guard lock(mutex_);
    updates_.push_back(std::move(update));
  }
  changed_.notify_all();
}

void UpdateQueue::fail(const Status& failure) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_.ok()) failure_ = failure;
  }
  changed_.notify_all();
}

}  // namespace muster::membership
