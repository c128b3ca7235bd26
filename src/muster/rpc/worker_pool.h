/// An agent's threads for handlers, started when first needed.
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

#include "muster/rpc/agent_thread.h"

namespace muster::rpc {

class WorkerPool {
 public:
  using Task = std::function<void()>;

  WorkerPool(const Agent* agent, int most, BindThread bind)
      : agent_(agent), most_(most), bind_(std::move(bind)) {}

  /// False where it will not run: the pool was stopped, or gets no thread.
  bool run(Task task);
  /// Code of the user's, on a thread of its own (base/callback_executor.h), bound as the pool's
  /// are: it may wait for other callbacks. `join` waits until it has returned, `owner` lives until
  /// then.
  void run_callback(std::shared_ptr<const void> owner, Task callback);
  /// Lets threads end once nothing waits.
  void stop();
  void join();
  /// No task and no callback waits or runs.
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
  std::atomic<std::int64_t> busy_{0};  // tasks and callbacks that wait or run
};

}  // namespace muster::rpc
