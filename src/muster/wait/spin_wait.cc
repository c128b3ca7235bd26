#include "muster/wait/spin_wait.h"

namespace muster {
namespace {

// Longer than a sleeper takes to come back, which a machine that is shared may make some hundred
// microseconds: else ranks that have slept once would find each other asleep at every call from
// then on.
constexpr Duration kSpin = std::chrono::microseconds(40);
constexpr Duration kYield = std::chrono::milliseconds(1);
// Some 40 ns each.
constexpr int kPauses = 500;
// Of ranks that share cores, times the ranks of a core.
constexpr Duration kYieldForPeers = std::chrono::microseconds(100);
// Some microseconds, which is less than until a core that is given away comes back.
constexpr int kPausesOnShared = 100;
// Mostly the answer is there sooner than a sleeper would be woken.
constexpr Duration kYieldForAnswer = std::chrono::microseconds(60);

}  // namespace

SpinBudget SpinBudget::before_sleep(const Topology& topology) {
  return {.pauses = topology.dedicated() ? kNoLimit : 0, .spin = kSpin, .yield = kYield};
}

SpinBudget SpinBudget::for_peers(const Topology& topology) {
  if (topology.dedicated()) return {.pauses = kPauses};
  return {.yield = topology.rounds(kYieldForPeers), .pauses_on_shared = kPausesOnShared};
}

SpinBudget SpinBudget::for_started_call(const Topology& topology) {
  if (topology.dedicated()) return {.pauses = kNoLimit};
  return for_peers(topology);
}

SpinBudget SpinBudget::for_answer() { return {.yield = kYieldForAnswer}; }

}  // namespace muster
