// SPDX-License-Identifier: BSD-3-Clause
/// For memory that something may still write to which cannot be stopped.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/base/process/fork_guard.h"

namespace muster {

/// Never lets go of `owner`, which stays reachable for leak checkers. Thread-safe.
inline void keep_forever(std::shared_ptr<void> owner) {
  struct KeptOwners {
    std::mutex lock;
    std::vector<std::shared_ptr<void>> owners;
  };
  static constinit PerProcess<KeptOwners> of_process;
  KeptOwners& kept = of_process.get();
  const std::lock_guard guard(kept.lock);
  kept.owners.push_back(std::move(owner));
}

}  // namespace muster
