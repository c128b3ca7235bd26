/// Connections that a server has refused, because they did not prove the secret or are not allowed.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "muster/clock.h"

namespace muster {

/// Counts them and limits their log lines to one a second. Thread-safe.
class RefusalCount {
 public:
  /// The line to log: `sentence`, with the number of refusals not logged since the last line. Empty
  /// if the last line is less than a second old.
  std::optional<std::string> note(std::string_view sentence, TimePoint now);
  std::uint64_t count() const;

 private:
  mutable std::mutex mutex_;
  std::uint64_t count_ = 0, unlogged_ = 0;
  std::optional<TimePoint> last_line_;
};

}  // namespace muster
