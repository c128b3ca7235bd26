// SPDX-License-Identifier: BSD-3-Clause
/// Effects of processes without the secret: connections that a server refuses, and answers that
/// anybody on the way can have forged.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "muster/clock.h"
#include "muster/status.h"

namespace muster {

/// Counts the connections that a server has refused, because they did not prove the secret or are
/// not allowed, and limits their log lines to one a second. Thread-safe.
class RefusalCount {
 public:
  /// The line to log: `sentence`, with the number of refusals not logged since the last line. Empty
  /// if the last line is less than a second old.
  std::optional<std::string> note(std::string_view sentence, TimePoint now);
  std::uint64_t count() const;

 private:
  mutable std::mutex mutex_;  // guards all below
  std::uint64_t count_ = 0, unlogged_ = 0;
  std::optional<TimePoint> last_line_;
};

/// The answers that come before a connection's keys are made, in the order of the connections that
/// one attempt makes. Anybody on the way can have forged them, so under a secret none of them ends
/// the attempt by itself. Used by one thread.
class ClearAnswers {
 public:
  /// limit: of a rank whose secret or job's name really is wrong, to be told so
  static constexpr Duration kPatience = std::chrono::seconds(3);

  /// A connection was refused in the clear. True once all have been for `kPatience`, or if no other
  /// can be made before `deadline`, as the next one begins after `pause`.
  bool tell(TimePoint now, TimePoint deadline, Duration pause) {
    if (!refused_) since_ = now;
    refused_ = true;
    return now - since_ >= kPatience || deadline - now <= pause;
  }
  /// A connection ended in another way.
  void forget() { refused_ = false; }

  /// The error that the attempt ends with.
  static Status told(const Status& said) {
    return Status(
        said.code(),
        "every answer was in the clear (unauthenticated): it is what the other side says, "
        "or somebody on the network forges it. It said: " +
            said.message(),
        said.ranks());
  }

 private:
  bool refused_ = false;
  TimePoint since_{};  ///< of the first of those that were refused in a row
};

}  // namespace muster
