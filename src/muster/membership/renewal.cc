#include "muster/membership/renewal.h"

#include "muster/base/thread_start.h"

namespace muster::membership {
namespace {

constexpr int kRenewalsInTtl = 4;  // so many signs of life in its time

}  // namespace

Status Renewal::begin(std::function<Status(TimePoint)> renew) {
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
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Status Renewal::state() const {
  const std::lock_guard lock(mutex_);
  if (!lost_) return lost_;
  if (steady_clock().now() - heard_ < ttl_) return {};
  return refused(service_ + " has not answered for its time of " + describe(ttl_) +
                 (trouble_.empty() ? "" : " (" + trouble_ + ")"));
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
  std::unique_lock lock(mutex_);
  while (!stop_ && lost_.ok()) {
    wake_.wait_for(lock, ttl_ / kRenewalsInTtl);
    if (stop_) return;
    lock.unlock();
    const TimePoint begin = steady_clock().now();
    const Status kept = renew(begin + ttl_ / 2);
    lock.lock();
    if (kept.ok()) {
      heard_ = begin;
    } else if (kept.code() == Code::closed) {
      if (lost_.ok()) lost_ = refused(kept.message());
    } else {
      trouble_ = kept.message();
    }
  }
}

}  // namespace muster::membership
