/// For memory that something may still write to which cannot be stopped.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace muster {

/// Never lets go of `owner`, which stays reachable for leak checkers. Thread-safe.
inline void keep_forever(std::shared_ptr<void> owner) {
  static std::mutex lock;
  static auto* const kept = new std::vector<std::shared_ptr<void>>;
  const std::lock_guard guard(lock);
  kept->push_back(std::move(owner));
}

}  // namespace muster
