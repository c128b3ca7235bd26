#include "core/wait/core_offer.h"

#include "core/tunables/tunables.h"
#include "core/wait/spin_wait.h"

namespace muster {
namespace {

constexpr int kPollsOnOneCore = 2;  // limit: used after a yield that helped; the news may still
                                    // come with the next poll

}  // namespace

void CoreOffer::polled(bool news) {
  if (news) {
    polls_.store(helped_ ? kPollsOnOneCore : many_polls(), std::memory_order_relaxed);
    idle_ = 0;
    helped_ = false;
  } else if (++idle_ > polls_.load(std::memory_order_relaxed)) {
    const TimePoint before = steady_clock().now();
    yield_core();
    const Duration took = steady_clock().now() - before;
    // Another thread ran during the yield, and not for longer than a peer's turn takes.
    helped_ = took > tunables().offer_taken && took < tunables().peer_yield;
  }
}

}  // namespace muster
