/// The finished or unfinished state of a started call.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "muster/base/status.h"
#include "muster/collective/communicator.h"

namespace muster::collective {

/// Thread-safe. Whoever publishes runs the callbacks, once no lock is held.
class Completion : public Pending {
 public:
  using Callbacks = std::vector<std::function<void(const Status&)>>;

  bool published() const { return done_.load(std::memory_order_acquire); }
  /// Once `published`.
  const Status& status() const { return status_; }

  void when_done(std::function<void(const Status&)> callback) override {
    {
      const std::lock_guard guard(lock_);
      if (!published()) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback(status_);
  }
  int source() const override { return -1; }
  std::size_t bytes() const override { return 0; }

 protected:
  /// Only the first publication counts; the callbacks to run are returned.
  Callbacks publish(Status status) {
    const std::lock_guard guard(lock_);
    if (published()) return {};
    status_ = std::move(status);
    done_.store(true);
    return std::exchange(callbacks_, {});
  }
  /// For a call that nobody but its waiting thread knows: touches nothing once that thread can see it.
  void publish_unshared(Status status) {
    status_ = std::move(status);
    done_.store(true);
  }

  std::mutex lock_;

 private:
  std::atomic<bool> done_{false};
  Status status_;
  Callbacks callbacks_;
};

/// A call that was over before it began.
class Finished final : public Completion {
 public:
  explicit Finished(Status status) { publish_unshared(std::move(status)); }
  bool done() const override { return true; }
  Status wait(TimePoint) override { return status(); }
};

}  // namespace muster::collective
