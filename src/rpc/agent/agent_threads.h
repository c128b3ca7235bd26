// SPDX-License-Identifier: BSD-3-Clause
/// An agent's life (its state, and the number of threads that use it), its listener and its pool.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/transport/fabric.h"
#include "core/wait/spin_wait.h"

namespace muster::rpc {
class AgentLife {
 public:
  enum class State : std::uint8_t { made, running, stopped };

  State state() const { return state_.load(); }
  bool stopped() const { return state_.load(std::memory_order_relaxed) == State::stopped; }
  /// Returns false if it was started or stopped before.
  bool start() {
    auto made = State::made;
    return state_.compare_exchange_strong(made, State::running);
  }
  void stop() { state_.store(State::stopped); }
  bool in_use() const { return users_.load() > 0; }

  /// Delays the agent's end during its lifetime. False if the agent has ended already.
  class AgentUse {
   public:
    explicit AgentUse(AgentLife& life) : life_(life) {
      life_.users_.fetch_add(1);
      running_ = life_.state_.load() != State::stopped;
    }
    ~AgentUse() { life_.users_.fetch_sub(1); }
    AgentUse(const AgentUse&) = delete;
    AgentUse& operator=(const AgentUse&) = delete;
    explicit operator bool() const { return running_; }

   private:
    AgentLife& life_;
    bool running_ = false;
  };

 private:
  // A user counts itself before it reads the state; the shutdown sets the state before it reads the
  // count. Both are seq_cst, so the user sees the end or the shutdown waits for the user.
  std::atomic<State> state_{State::made};
  std::atomic<int> users_{0};  // threads in use
};

// Marks a thread as belonging to an agent while it runs.

class Agent;

/// Binds a thread to its worker if workers are threads of one process.
using BindThread = std::function<std::shared_ptr<void>()>;

class AgentThread {
 public:
  AgentThread(const Agent* agent, const BindThread& bind) : bound_(bind ? bind() : nullptr) {
    current = agent;
  }
  ~AgentThread() { current = before_; }
  AgentThread(const AgentThread&) = delete;
  AgentThread& operator=(const AgentThread&) = delete;

  static bool runs_here(const Agent* agent) { return current == agent; }

 private:
  static inline constinit thread_local const Agent* current = nullptr;
  const std::shared_ptr<void> bound_;
  const Agent* const before_ = current;
};

// The thread that drives an agent's messages while no caller does.

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
  // The listener sets `dozing_` before it reads `drivers_`, and the last driver leaves `drivers_`
  // before it reads `dozing_`. Both are seq_cst, so the one sees the other and no wake-up is lost.
  std::atomic<bool> dozing_{false};
  std::mutex mutex_;  // guards no data: a notice comes before the listener's check or in its wait
  std::condition_variable wanted_;
};

// An agent's handler threads, started on demand.

class WorkerPool {
 public:
  using Task = std::function<void()>;

  WorkerPool(const Agent* agent, int most, BindThread bind)
      : agent_(agent), most_(most), bind_(std::move(bind)) {}

  /// Returns false if the task will not run because the pool is stopped or no thread is available.
  bool run(Task task);
  /// Runs user code on its own thread (core/wait/callbacks.h), bound like the
  /// pool's threads; it may wait for other callbacks. `join` waits for it to return, and `owner`
  /// lives until then.
  void run_callback(std::shared_ptr<const void> owner, Task callback);
  /// Lets threads exit once no task waits.
  void stop();
  void join();
  /// No task and no callback is waiting or running.
  bool idle() const { return busy_.load() == 0; }

 private:
  bool add_thread();
  void work();

  const Agent* const agent_;
  const int most_;
  const BindThread bind_;
  std::mutex mutex_;  // guards down to `stopped_`; tasks and callbacks run without it
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::vector<std::thread> threads_;
  int idle_threads_ = 0;
  bool stopped_ = false;
  std::atomic<std::int64_t> busy_{0};  // tasks and callbacks waiting or running
};

}  // namespace muster::rpc
