// SPDX-License-Identifier: BSD-3-Clause
/// A process-wide map from object addresses to values.
#pragma once

#include <mutex>
#include <unordered_map>

namespace muster::parallel {

/// The caller must remove an object before it is destroyed. Thread-safe.
template <class Value>
class ProcessTable {
 public:
  void put(const void* object, Value value) {
    const std::lock_guard lock(mutex_);
    values_[object] = value;
  }
  void remove(const void* object) {
    const std::lock_guard lock(mutex_);
    values_.erase(object);
  }
  /// The object's value; value-initialised if there is none.
  Value find(const void* object) const {
    const std::lock_guard lock(mutex_);
    const auto found = values_.find(object);
    return found == values_.end() ? Value() : found->second;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<const void*, Value> values_;
};

}  // namespace muster::parallel
