/// What this process knows of objects that are not its own, by their addresses.
#pragma once

#include <mutex>
#include <unordered_map>

namespace muster::parallel {

/// Whoever puts an object in takes it out before it may be gone. Thread-safe.
template <class Value>
class ProcessTable {
 public:
  void put(const void* object, Value value) {
    const std::lock_guard lock(mutex_);
    values_[object] = value;
  }
  void take_out(const void* object) {
    const std::lock_guard lock(mutex_);
    values_.erase(object);
  }
  /// What stands for it; a value-initialized one for what is not there.
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
