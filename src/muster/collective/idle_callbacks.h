/// Callbacks that threads want called while they wait in a communicator.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace muster::collective {

/// Thread-safe. A callback runs only on the thread that added it, so it may terminate that thread.
class IdleCallbacks {
 public:
  using Look = std::function<void()>;

  void add(const Look& look) {
    const std::lock_guard guard(lock_);
    looks_.emplace_back(std::this_thread::get_id(), &look);
    count_.store(looks_.size());
  }
  void remove(const Look& look) {
    const std::lock_guard guard(lock_);
    std::erase_if(looks_, [&](const auto& entry) { return entry.second == &look; });
    count_.store(looks_.size());
  }

  /// Runs this thread's callbacks. Returns whether there are any.
  bool look() const {
    if (count_.load(std::memory_order_relaxed) == 0)
      return false;  // this thread always sees its own additions
    std::vector<const Look*> mine;
    {
      const std::lock_guard guard(lock_);
      for (const auto& [thread, look] : looks_)
        if (thread == std::this_thread::get_id()) mine.push_back(look);
    }
    for (const Look* look : mine) (*look)();
    return !mine.empty();
  }

 private:
  mutable std::mutex lock_;
  std::vector<std::pair<std::thread::id, const Look*>> looks_;
  std::atomic<std::size_t> count_{0};
};

}  // namespace muster::collective
