/// An agent's threads for handlers and callbacks, started when first needed.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "muster/rpc/agent_thread.h"

namespace muster::rpc {

class WorkerPool {
 public:
  using Task = std::function<void()>;

  WorkerPool(const Agent* agent, int most, BindThread bind)
      : agent_(agent), most_(most), bind_(std::move(bind)) {}

  /// False once stopped: it will not run.
  bool run(Task task);
  /// Lets threads end once nothing waits.
  void stop();
  void join();
  /// No task waits or runs.
  bool idle() const { return busy_.load() == 0; }

 private:
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
  std::atomic<std::int64_t> busy_{0};  // tasks that wait or run
};

}  // namespace muster::rpc
