#include "muster/wait/core_offer.h"

#include "muster/wait/spin_wait.h"

namespace muster {
namespace {

constexpr int kPollsOnOneCore = 2;
// An offer that took as long was taken; for longer, and it was not the peer that took it.
constexpr Duration kTaken = std::chrono::nanoseconds(1200);
constexpr Duration kTakenByOthers = std::chrono::microseconds(100);

}  // namespace

void CoreOffer::polled(bool news) {
  if (news) {
    polls_.store(helped_ ? kPollsOnOneCore : kManyPolls, std::memory_order_relaxed);
    idle_ = 0;
    helped_ = false;
  } else if (++idle_ > polls_.load(std::memory_order_relaxed)) {
    const TimePoint before = steady_clock().now();
    yield_core();
    const Duration took = steady_clock().now() - before;
    helped_ = took > kTaken && took < kTakenByOthers;
  }
}

}  // namespace muster
