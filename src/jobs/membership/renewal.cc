// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/membership/renewal.h"

#include <algorithm>
#include <utility>

#include "core/base/threads/thread_start.h"

namespace muster::membership {
namespace {

constexpr int kRenewalsInTtl = 4;   // so many signs of life in its time
constexpr int kAttemptsInTtl = 16;  // so many more where the last one had no answer

}  // namespace

Status Renewal::begin(std::function<Status(TimePoint)> renew) {
  due_ = steady_clock().now() + ttl_ / kRenewalsInTtl;
  auto thread = start_thread("the thread that keeps a name in " + service_,
                             [this, renew = std::move(renew)] { run(renew); });
  if (!thread) return thread.status();
  thread_ = std::move(*thread);
  return {};
}

void Renewal::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopping_->raise("the hold of \"" + name_ + "\" ends");
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool Renewal::is_silent(TimePoint now) const {
  return now - heard_ >= ttl_ && !asking_again_ && !stood_still(now);
}

Status Renewal::state() const {
  const std::lock_guard lock(mutex_);
  if (!lost_) return lost_;
  if (!is_silent(steady_clock().now())) return {};
  return Status(Code::timed_out, service_ + " has not answered about the hold of \"" + name_ +
                                     "\" for its time of " + describe(ttl_) +
                                     (trouble_.empty() ? "" : " (" + trouble_ + ")"));
}

TimePoint Renewal::expires() const {
  const std::lock_guard lock(mutex_);
  const TimePoint now = steady_clock().now();
  if (!lost_ || is_silent(now)) return now;
  return std::max(heard_ + ttl_, now + slack());
}

TimePoint Renewal::silent_until() const {
  const std::lock_guard lock(mutex_);
  const TimePoint now = steady_clock().now();
  const bool ran = !asking_again_ && !stood_still(now);
  return lost_.ok() && ran && may_cost_places(now) ? TimePoint::max() : silent_until_;
}

void Renewal::lose(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (lost_.ok()) lost_ = refused(why);
}

bool Renewal::lost() const {
  const std::lock_guard lock(mutex_);
  return !lost_.ok();
}

Status Renewal::refused(const std::string& why) const {
  return Status(Code::refused, "the hold of \"" + name_ + "\" is lost: " + why);
}

void Renewal::run(const std::function<Status(TimePoint)>& renew) {
  const Interruption::InterruptionBinding binding(stopping_);
  std::unique_lock lock(mutex_);
  while (!stop_ && lost_.ok()) {
    if (!asking_again_) {
      // A service that did not answer is asked again soon: another of its members may.
      const int in_ttl = trouble_.empty() ? kRenewalsInTtl : kAttemptsInTtl;
      due_ = steady_clock().now() + ttl_ / in_ttl;
      wake_.wait_until(lock, due_, [this] { return stop_; });
    }
    if (stop_) return;
    const TimePoint begin = steady_clock().now();
    const bool again = asking_again_ || stood_still(begin);
    asking_again_ = again;
    due_ = begin + ttl_ / (again ? 4 : 2);
    lock.unlock();
    const Status kept = renew(due_);
    lock.lock();
    // After standing still in the middle of a request the service is asked again, once. An answer
    // to the first may be as old as the request.
    const TimePoint answered = steady_clock().now();
    asking_again_ = !again && stood_still(answered);
    if (kept.ok()) {
      if (!again && !asking_again_ && may_cost_places(answered)) silent_until_ = answered;
      heard_ = begin;
      trouble_.clear();
    } else if (kept.code() == Code::closed) {
      if (lost_.ok()) lost_ = refused(kept.message());
    } else {
      trouble_ = kept.message();
    }
    due_ = std::max(due_, steady_clock().now());
  }
}

}  // namespace muster::membership
