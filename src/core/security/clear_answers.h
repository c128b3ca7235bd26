/// Answers that come before a connection's keys are made. Anybody on the way can have forged them,
/// so under a secret none of them ends an attempt to connect by itself.
#pragma once

#include <chrono>
#include <string>

#include "muster/clock.h"
#include "muster/status.h"

namespace muster {

/// The answers of the connections that one attempt makes, in order. Used by one thread.
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

  /// What the attempt ends with.
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
