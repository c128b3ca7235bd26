// SPDX-License-Identifier: BSD-3-Clause
/// The epoll sets of a fabric: what links have news, what a connector waits for, and what wakes the
/// watcher. Private to `transport/`.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "core/base/process/fork_guard.h"
#include "core/tunables/tunables_fixed.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::transport {

/// The descriptors of a fabric that have news: an epoll set that pollers ask without waiting and
/// the watcher sleeps on.
class ReadySet {
 public:
  static constexpr int kConnector = -1;
  struct Ready {
    int token = 0;  ///< a rank, or kConnector
    bool readable = false;
    bool writable = false;
  };

  Status open();
  /// For epoll in epoll: readable while anything in here is ready.
  int descriptor() const { return epoll_.get(); }
  bool add(int descriptor, int token);
  bool want_writable(int descriptor, int token, bool on);
  void remove(int descriptor);
  /// The descriptors that are ready now, at most `fixed::kReadyLinks`; one system call. Valid until
  /// the next one.
  std::span<const Ready> poll();

 private:
  GuardedDescriptor epoll_;
  Ready ready_[fixed::kReadyLinks];
};

/// A connector's descriptors in one epoll set, with one of its own for work that needs no other.
class WakeSet {
 public:
  Status open();
  Status watch(int descriptor);
  /// For epoll: readable while any of them is ready.
  int descriptor() const { return epoll_.get(); }
  bool any_ready() const;
  /// Makes the set ready until `drain`.
  void nudge();
  /// True where it was nudged.
  bool drain();

 private:
  GuardedDescriptor epoll_;
  GuardedDescriptor nudge_;  // an eventfd
};

/// How the watcher thread is woken: by news on descriptors while it is armed, and by a kick.
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
  // Set under the engine's lock, just before `watch_news`; cleared by the watcher when news have
  // fired, which disables them in the set (EPOLLONESHOT).
  std::atomic<bool> armed_{false};
  // One write for many kicks. The watcher clears it before it looks at the state, so a kick that
  // finds it set is followed by that look.
  std::atomic<bool> kicked_{false};
};

}  // namespace muster::transport
