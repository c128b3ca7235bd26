// SPDX-License-Identifier: BSD-3-Clause
/// How threads wait in a fabric, and the thread that drives it while none does. Private to
/// `transport/`.
#pragma once

#include <atomic>
#include <functional>
#include <thread>

#include "core/base/process/fork_guard.h"
#include "core/transport/engine/epoll_sets.h"
#include "core/transport/engine/pass_loop.h"
#include "muster/status.h"

namespace muster::transport {

/// A thread that waits makes passes while there is progress, then pauses, then sleeps.
class EngineWait {
 public:
  EngineWait(EngineContext& engine, PassLoop& loop) : engine_(engine), loop_(loop) {}

  /// `Fabric::wait`.
  bool wait(const std::function<bool()>& done, TimePoint deadline);
  /// `Fabric::spin_for_peer`.
  bool spin_for_peer(int rank) const;

 private:
  class Poller;
  enum class Slept : std::uint8_t {
    nothing,   ///< woken for nothing
    progress,  ///< the awaited operation has made progress
    done,
  };
  Slept sleep_until_news(TimePoint until, const std::function<bool()>& done);

  EngineContext& engine_;
  PassLoop& loop_;
  // Threads between their announcement and their return. A thread that stops polling reads it after
  // it has left the pollers, and then arms the watcher for those that sleep.
  std::atomic<int> sleepers_{0};
};

/// The thread that drives a fabric while no thread waits in it: it sleeps in epoll on descriptors
/// and timers, makes passes, and stays away while user threads poll.
class Watcher {
 public:
  Watcher(PassLoop& loop, WatcherSignal& signal) : loop_(loop), signal_(signal) {}
  ~Watcher() { stop(); }

  /// `rank`: for its log.
  Status start(int rank);
  /// Joins the thread. In a forked child, which has no such thread, forgets it.
  void stop();

 private:
  void run(int rank);

  PassLoop& loop_;
  WatcherSignal& signal_;
  std::atomic<bool> stop_{false};
  ProcessMark mark_;
  std::thread thread_;
};

}  // namespace muster::transport
