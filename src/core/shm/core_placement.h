/// The processors on which the members of a group run, as far as they have published them.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "core/shm/group_segment.h"

namespace muster::shm {

/// Where the awaited members run.
enum class MissingPeers : std::uint8_t {
  none,
  elsewhere,  ///< all on other processors than this member's
  here,       ///< at least one may need this processor
};

/// Among the members in [first, last).
template <class IsMissing, class IsElsewhere>
MissingPeers missing_among(int first, int last, IsMissing is_missing, IsElsewhere is_elsewhere) {
  MissingPeers found = MissingPeers::none;
  for (int member = first; member < last; ++member) {
    if (!is_missing(member)) continue;
    if (!is_elsewhere(member)) return MissingPeers::here;
    found = MissingPeers::elsewhere;
  }
  return found;
}

class CorePlacement {
 public:
  explicit CorePlacement(GroupSegment& segment) : segment_(segment) {}

  /// Publishes the processor on which this thread runs.
  void publish() {
    const auto core = static_cast<std::uint32_t>(::sched_getcpu() + 1);
    if (core != core_)
      segment_.progress(segment_.rank()).core.store(core_ = core, std::memory_order_relaxed);
  }
  /// Whether a member is known to run on another processor.
  bool is_elsewhere(int member) const {
    const std::uint32_t theirs = segment_.progress(member).core.load(std::memory_order_relaxed);
    return core_ != 0 && theirs != 0 && theirs != core_;
  }

 private:
  GroupSegment& segment_;
  std::uint32_t core_ = 0;  // as published
};

}  // namespace muster::shm
