/// Who was turned away by a server: those that did not prove the secret, or may not come.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "muster/clock.h"

namespace muster {

/// Counts them, and says what to log: one line a second at most, however many come. Thread-safe.
class RefusalCount {
 public:
  /// `sentence` with the number of those that were not told since the last line; nothing where the
  /// last line is not a second old.
  std::optional<std::string> note(std::string_view sentence, TimePoint now);
  std::uint64_t count() const;

 private:
  mutable std::mutex mutex_;
  std::uint64_t count_ = 0, untold_ = 0;
  std::optional<TimePoint> told_;
};

}  // namespace muster
