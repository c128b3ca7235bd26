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

}  // namespace muster
