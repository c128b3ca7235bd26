// SPDX-License-Identifier: BSD-3-Clause
/// Tells the store that this launcher serves of each new epoch, so that it refuses workers of older
/// ones. For jobs whose epochs are committed elsewhere.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "core/base/descriptor.h"
#include "core/base/process/interruption.h"
#include "jobs/membership/membership.h"

namespace muster::launch {

/// On a thread of its own: the launcher's thread waits for no store, not even its own.
class EpochFence {
 public:
  /// `store`: the membership that lies in the store, whose calls have limits.
  static Result<std::unique_ptr<EpochFence>> start(std::unique_ptr<membership::Membership> store);
  ~EpochFence();

  void raise(const membership::Epoch& epoch);
  /// Readable once the last epoch given to `raise` has been told, or could not be at first.
  int descriptor() const { return event_.get(); }
  struct Raised {
    std::int64_t epoch = 0;
    /// Why the store goes on serving older epochs, until it takes this one: it is told again. Ok:
    /// it serves none.
    Status status{};
  };
  Raised take();

 private:
  explicit EpochFence(std::unique_ptr<membership::Membership> store) : store_(std::move(store)) {}
  void run();
  Status commit(const membership::Epoch& epoch);

  const std::unique_ptr<membership::Membership> store_;
  const std::shared_ptr<Interruption> closing_ = std::make_shared<Interruption>();
  Descriptor event_;
  std::mutex mutex_;  // guards down to `stop_`; not held during a request
  std::condition_variable work_;
  std::optional<membership::Epoch> wanted_;
  Raised result_;
  bool stop_ = false;
  std::int64_t revision_ = 0;  // by the thread: of the record in the store
  std::thread thread_;
};

}  // namespace muster::launch
