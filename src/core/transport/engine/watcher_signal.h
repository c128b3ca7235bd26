/// How the watcher thread is woken: by news on descriptors while it is armed, and by a kick.
/// Private to `transport/`.
#pragma once

#include <atomic>

#include "core/base/process/fork_guard.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::transport {

class WatcherSignal {
 public:
  /// `news`: a descriptor that is readable while there is something to do. Armed from then on.
  Status open(int news);
  bool is_open() const { return news_ >= 0; }

  /// Makes the watcher look at its timers anew. Thread-safe.
  void kick();
  /// Whether news wake the watcher.
  bool armed() const { return armed_.load(std::memory_order_acquire); }
  /// Says whether it was armed already; if not, `watch_news` must follow.
  bool set_armed() { return armed_.exchange(true); }
  void watch_news();
  /// For the watcher: sleeps until news, a kick or `until`. News disarm it.
  void sleep(TimePoint now, TimePoint until);

 private:
  GuardedDescriptor epoll_;
  GuardedDescriptor kick_;
  int news_ = -1;
  std::atomic<bool> armed_{false};
  std::atomic<bool> kicked_{false};
};

}  // namespace muster::transport
