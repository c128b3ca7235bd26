/// The thread that drives a fabric while no thread waits in it: it sleeps in epoll on descriptors
/// and timers, makes passes, and stays away while user threads poll. Private to `transport/`.
#pragma once

#include <atomic>
#include <thread>

#include "core/base/process/fork_guard.h"
#include "core/transport/engine/pass_loop.h"
#include "core/transport/engine/watcher_signal.h"
#include "muster/status.h"

namespace muster::transport {

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
