// SPDX-License-Identifier: BSD-3-Clause
#include "core/wait/spin_wait.h"

#include "core/tunables/tunables.h"

namespace muster {
SpinBudget SpinBudget::before_sleep(const Topology& topology) {
  return {.pauses = topology.dedicated() ? kNoLimit : 0,
          .spin = tunables().link_spin,
          .yield = tunables().link_yield};
}

SpinBudget SpinBudget::for_peers(const Topology& topology) {
  if (topology.dedicated()) return {.pauses = static_cast<int>(tunables().peer_pauses)};
  return {.yield = topology.rounds(tunables().peer_yield),
          .pauses_on_shared = static_cast<int>(tunables().shared_core_pauses)};
}

SpinBudget SpinBudget::for_started_call(const Topology& topology) {
  if (topology.dedicated()) return {.pauses = kNoLimit};
  return for_peers(topology);
}

SpinBudget SpinBudget::for_answer() { return {.yield = tunables().round_trip}; }

void CoreOffer::polled(bool news) {
  if (news) {
    polls_.store(helped_ ? fixed::kPollsOnOneCore : many_polls(), std::memory_order_relaxed);
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
