/// An agent's handler threads, started on demand.
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

#include "rpc/agent/agent_thread.h"

namespace muster::rpc {

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
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::vector<std::thread> threads_;
  int idle_threads_ = 0;
  bool stopped_ = false;
  std::atomic<std::int64_t> busy_{0};  // tasks and callbacks waiting or running
};

}  // namespace muster::rpc
