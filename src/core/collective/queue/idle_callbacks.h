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
  using Callback = std::function<void()>;

  void add(const Callback& callback) {
    const std::lock_guard guard(lock_);
    callbacks_.emplace_back(std::this_thread::get_id(), &callback);
    count_.store(callbacks_.size());
  }
  void remove(const Callback& callback) {
    const std::lock_guard guard(lock_);
    std::erase_if(callbacks_, [&](const auto& entry) { return entry.second == &callback; });
    count_.store(callbacks_.size());
  }

  /// Runs this thread's callbacks. Returns whether there are any.
  bool run() const {
    if (count_.load(std::memory_order_relaxed) == 0)
      return false;  // this thread always sees its own additions
    std::vector<const Callback*> mine;
    {
      const std::lock_guard guard(lock_);
      for (const auto& [thread, callback] : callbacks_)
        if (thread == std::this_thread::get_id()) mine.push_back(callback);
    }
    for (const Callback* callback : mine) (*callback)();
    return !mine.empty();
  }

 private:
  mutable std::mutex lock_;
  std::vector<std::pair<std::thread::id, const Callback*>> callbacks_;
  std::atomic<std::size_t> count_{0};
};

/// Adds `callback` until the returned scope is destroyed. The scope keeps `owner`, which contains
/// `callbacks`, alive.
template <class Owner>
std::shared_ptr<void> idle_scope(std::shared_ptr<Owner> owner, IdleCallbacks& callbacks,
                                 IdleCallbacks::Callback callback) {
  struct IdleScope {
    IdleScope(std::shared_ptr<Owner> in, IdleCallbacks& all, IdleCallbacks::Callback what)
        : owner(std::move(in)), callbacks(all), callback(std::move(what)) {
      callbacks.add(callback);
    }
    ~IdleScope() { callbacks.remove(callback); }
    const std::shared_ptr<Owner> owner;
    IdleCallbacks& callbacks;
    const IdleCallbacks::Callback callback;
  };
  return std::make_shared<IdleScope>(std::move(owner), callbacks, std::move(callback));
}

}  // namespace muster::collective
