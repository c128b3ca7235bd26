/// The thread that looks after a fabric while nobody waits in it: it sleeps in epoll on descriptors
/// and timers, makes passes, and keeps away while user threads poll.
#pragma once

#include <atomic>
#include <thread>

#include "muster/base/clock.h"
#include "muster/base/fork_guard.h"
#include "muster/base/status.h"

namespace muster::transport {

class Engine;

class Watcher {
 public:
  explicit Watcher(Engine& engine) : engine_(engine) {}
  ~Watcher();

  /// `news`: a descriptor that is readable while there is something to do.
  Status start(int news);
  /// Joins the thread. In a forked child, where there is none, forgets it.
  void stop();
  /// Makes it look at its timers anew.
  void kick();
  /// From here on news wake it again; called by a poller that stops polling. One atomic load where
  /// they do already.
  void rearm();
  /// Whether news wake it.
  bool armed() const { return armed_.load(std::memory_order_acquire); }

 private:
  void run();
  void arm();

  Engine& engine_;
  GuardedDescriptor epoll_;
  GuardedDescriptor kick_;
  int news_ = -1;
  std::atomic<bool> armed_{false};
  std::atomic<bool> kicked_{false};
  std::atomic<bool> stop_{false};
  ProcessMark mark_;
  std::thread thread_;
};

}  // namespace muster::transport
