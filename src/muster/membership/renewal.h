/// The life of a hold that a service forgets unless it is renewed: the thread that does so, and
/// what is known of it.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "muster/clock.h"
#include "muster/status.h"

namespace muster::membership {

/// Thread-safe.
class Renewal {
 public:
  /// `granted`: before the service was asked for the hold.
  Renewal(std::string service, std::string name, Duration ttl, TimePoint granted)
      : service_(std::move(service)), name_(std::move(name)), ttl_(ttl), heard_(granted) {}
  ~Renewal() { stop(); }

  /// Calls `renew` with a deadline, on a thread of its own, several times in the ttl.
  /// Code::closed: the hold is lost, for the reason in the message.
  Status begin(std::function<Status(TimePoint)> renew);
  void stop();

  /// Code::refused once the hold is lost or the service has been silent for the ttl.
  Status state() const;
  void lose(const std::string& why);
  /// Whether the service has said so.
  bool lost() const;

 private:
  Status refused(const std::string& why) const;
  void run(const std::function<Status(TimePoint)>& renew);

  const std::string service_;
  const std::string name_;
  const Duration ttl_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  Status lost_;
  std::string trouble_;
  TimePoint heard_;
  std::thread thread_;
};

}  // namespace muster::membership
