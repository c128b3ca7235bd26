/// Yields for a poll nested in another component's wait loop: the peer that owes the answer may
/// need this core.
#pragma once

#include <atomic>

#include "core/tunables/tunables.h"
#include "muster/clock.h"

namespace muster {

/// Yields the core after a number of polls without news. A peer that polls on another core answers
/// before that. A peer on this core can answer only after the yield; once that has happened, the
/// next yield comes after 2 polls. Use one object per wait; the learned poll count lives in
/// `polls`, which several threads may share.
class CoreOffer {
 public:
  static int many_polls() { return static_cast<int>(tunables().offer_polls); }

  /// `polls`: initialize with `many_polls()`.
  explicit CoreOffer(std::atomic<int>& polls) : polls_(polls) {}
  /// Call after each poll.
  void polled(bool news);

 private:
  std::atomic<int>& polls_;
  int idle_ = 0;         // polls without news
  bool helped_ = false;  // the last yield ran the awaited peer
};

}  // namespace muster
