// SPDX-License-Identifier: BSD-3-Clause
/// The state of a started call.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "core/collective/communicator.h"
#include "core/wait/callbacks.h"
#include "muster/status.h"

namespace muster::collective {

/// Thread-safe. The publishing thread runs the notices, and destroys them without holding a lock.
class Completion : public Pending {
 public:
  using Notices = std::vector<std::function<void(const Status&)>>;

  bool published() const { return done_.load(std::memory_order_acquire); }
  /// Only after `published`.
  const Status& status() const { return status_; }

  void when_done(std::function<void(const Status&)> callback) override {
    when_settled([callback = std::move(callback)](const Status& status) {
      CallbackExecutor::of_process().run([callback, status] { callback(status); });
    });
  }
  void when_settled(std::function<void(const Status&)> notice) override {
    {
      const std::lock_guard guard(lock_);
      if (!published()) {
        notices_.push_back(std::move(notice));
        return;
      }
    }
    notice(status_);
  }
  int source() const override { return -1; }
  std::size_t bytes() const override { return 0; }

 protected:
  /// Only the first publication counts. Returns the notices to run.
  Notices publish(Status status) {
    const std::lock_guard guard(lock_);
    if (published()) return {};
    status_ = std::move(status);
    done_.store(true);
    return std::exchange(notices_, {});
  }
  /// For a call that only its waiting thread knows: accesses nothing after that thread can see the
  /// result.
  void publish_unshared(Status status) {
    status_ = std::move(status);
    done_.store(true);
  }

  // Guards `notices_`, and in derived classes what a call holds until it has ended. Nothing else is
  // locked and no notice runs under it.
  std::mutex lock_;

 private:
  // Set once, after `status_`, which never changes again; pairs with the acquire in `published`.
  std::atomic<bool> done_{false};
  Status status_;
  Notices notices_;  // moved out by the publication, so each runs once
};

/// A call that ended before it began.
class Finished final : public Completion {
 public:
  explicit Finished(Status status) { publish_unshared(std::move(status)); }
  bool done() const override { return true; }
  Status wait(TimePoint) override { return status(); }
};

}  // namespace muster::collective
