/// Polling inside somebody else's wait, for an answer that a thread on the same core may owe.
#pragma once

#include <atomic>

#include "muster/base/clock.h"
#include "muster/base/tunables.h"

namespace muster {

/// Offers the core after a number of polls without news. An answer from a peer that polls on
/// another core comes sooner; one from a peer that was put on this core comes only then, and where
/// that has just been so, the core is offered almost at once. One object a wait; what it learns
/// stays in `polls`, which many threads may share.
class CoreOffer {
 public:
  static int many_polls() { return static_cast<int>(tunables().offer_polls); }

  /// `polls`: begins at `many_polls`.
  explicit CoreOffer(std::atomic<int>& polls) : polls_(polls) {}
  /// After each poll.
  void polled(bool news);

 private:
  std::atomic<int>& polls_;
  int idle_ = 0;  // polls without news
  bool helped_ = false;
};

}  // namespace muster
