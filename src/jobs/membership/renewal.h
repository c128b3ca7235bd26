// SPDX-License-Identifier: BSD-3-Clause
/// The life of a hold that a service forgets unless it is renewed: the thread that does so, and
/// what is known of it.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "core/base/process/interruption.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::membership {

/// Thread-safe. Only the service's word loses the hold. Its silence for the ttl says that others
/// may have lost sight of this process; time in which this process itself stood still (SIGSTOP, a
/// suspended machine) does not even say that: the service is asked once more before it is judged.
class Renewal {
 public:
  /// `granted`: before the service was asked for the hold.
  Renewal(std::string service, std::string name, Duration ttl, TimePoint granted)
      : service_(std::move(service)), name_(std::move(name)), ttl_(ttl), heard_(granted) {}
  ~Renewal() { stop(); }

  /// Calls `renew` with a deadline, on a thread of its own, several times in the ttl.
  /// Code::closed: the hold is lost, for the reason in the message. `stop` interrupts it.
  Status begin(std::function<Status(TimePoint)> renew);
  void stop();

  /// Code::refused once the hold is lost; Code::timed_out while the service has been silent for the
  /// ttl, which ends when it answers a renewal.
  Status state() const;
  /// When to look at `state` again: before that time it stays ok, unless the service says that the
  /// hold is lost.
  TimePoint expires() const;
  /// When the service answered again after it had been silent for so long, while this process ran,
  /// that it may have let other holds go; max: it is silent still; zero: it never was.
  TimePoint silent_until() const;
  void lose(const std::string& why);
  /// Whether the service has said so.
  bool lost() const;

 private:
  Status refused(const std::string& why) const;
  void run(const std::function<Status(TimePoint)>& renew);
  /// So late no thread is that runs.
  Duration slack() const { return ttl_ / 8; }
  bool stood_still(TimePoint now) const { return now - slack() > due_; }
  bool is_silent(TimePoint now) const;
  /// Each hold is renewed in a fraction of this time, so a shorter silence costs none.
  bool may_cost_places(TimePoint now) const { return now - heard_ >= ttl_ / 2; }

  const std::string service_;
  const std::string name_;
  const Duration ttl_;
  const std::shared_ptr<Interruption> stopping_ = std::make_shared<Interruption>();
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable wake_;
  bool stop_ = false;
  Status lost_;
  std::string trouble_;
  TimePoint heard_;                   // the beginning of the last request that was answered
  TimePoint silent_until_{};          // as `silent_until`, of the last silence that has ended
  TimePoint due_ = TimePoint::max();  // when the thread is to run again at the latest
  bool asking_again_ = false;         // after this process stood still
  std::thread thread_;
};

// Lets one request through at a time. Like std::timed_mutex, whose wait for a point in time the
// ThreadSanitizer of g++ 12 does not see. Holds no lock while the request runs; thread-safe.

class RequestTurn {
 public:
  void lock() {
    std::unique_lock guard(mutex_);
    free_.wait(guard, [this] { return !taken_; });
    taken_ = true;
  }
  /// False if the turn did not come before `deadline`.
  bool try_lock_until(TimePoint deadline) {
    std::unique_lock guard(mutex_);
    if (!free_.wait_until(guard, deadline, [this] { return !taken_; })) return false;
    taken_ = true;
    return true;
  }
  void unlock() {
    const std::lock_guard guard(mutex_);
    taken_ = false;
    free_.notify_one();
  }

 private:
  std::mutex mutex_;  // guards what follows; no other lock is taken under it
  std::condition_variable free_;
  bool taken_ = false;
};

}  // namespace muster::membership
