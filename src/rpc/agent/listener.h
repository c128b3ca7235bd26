/// The thread that drives an agent's messages while no caller does.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

#include "core/transport/fabric.h"
#include "core/wait/spin_wait.h"
#include "rpc/agent/agent_thread.h"

namespace muster::rpc {

class Listener {
 public:
  /// `progress` receives available messages and returns whether there were any.
  Listener(transport::Fabric& fabric, std::function<bool()> progress)
      : fabric_(fabric), progress_(std::move(progress)) {}

  Status start(const Agent* agent, const BindThread& bind);
  void stop();

  /// Scope of a caller that drives messages itself; the listener pauses.
  class ListenerDriver {
   public:
    explicit ListenerDriver(Listener& listener) : listener_(listener) {
      listener_.drivers_.fetch_add(1);
      listener_.entries_.fetch_add(1, std::memory_order_relaxed);
    }
    ~ListenerDriver() { listener_.on_driver_left(); }
    ListenerDriver(const ListenerDriver&) = delete;
    ListenerDriver& operator=(const ListenerDriver&) = delete;

   private:
    Listener& listener_;
  };
  /// Shared by all waiting threads; see `CoreOffer`.
  std::atomic<int>& idle_polls() { return idle_polls_; }

 private:
  void listen();
  void stand_by();
  void on_driver_left();

  transport::Fabric& fabric_;
  const std::function<bool()> progress_;
  std::thread thread_;
  std::atomic<bool> stopped_{false};
  std::atomic<int> drivers_{0};
  std::atomic<std::uint64_t> entries_{0};
  std::atomic<int> idle_polls_{
      CoreOffer::many_polls()};  // polls before a waiting thread offers its core
  std::atomic<bool> dozing_{false};
  std::mutex mutex_;
  std::condition_variable wanted_;
};

}  // namespace muster::rpc
