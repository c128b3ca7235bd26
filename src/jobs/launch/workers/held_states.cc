// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/workers/held_states.h"

#include <algorithm>

namespace muster::launch {

void HeldStates::begin(int place) {
  PlaceState& at = places_[static_cast<std::size_t>(place)];
  at.ended = at.left = false;
  if (!at.in_memory) at.state = {};
}

void HeldStates::end(int place) { places_[static_cast<std::size_t>(place)].ended = true; }

void HeldStates::take(int place, const WorkerWords& words, bool keeps_count) {
  PlaceState& at = places_[static_cast<std::size_t>(place)];
  if (words.memories) at.in_memory = !words.memories->empty();
  if (at.left) return;
  if (words.lost > 0) {
    at.state = {};
    if (!keeps_count) committed_ = 0;
  }
  committed_ = std::max(committed_, words.committed);
  if (words.state.epoch > 0) at.state = words.state;
}

void HeldStates::leave() {
  for (PlaceState& each : places_) {
    each.state = {};
    each.left = true;
  }
  committed_ = 0;
}

HeldState HeldStates::newest() const {
  HeldState newest;
  for (const PlaceState& each : places_) {
    if (each.ended && !each.in_memory) continue;
    // Workers of one epoch may tell of a division one after another.
    if (each.state.epoch == newest.epoch) newest.divided |= each.state.divided;
    if (each.state.epoch > newest.epoch) newest = each.state;
  }
  return newest;
}

int HeldStates::holder() const {
  const HeldState held = newest();
  const auto has_it = [&](const PlaceState& each) { return !each.ended && each.state == held; };
  const auto found = std::ranges::find_if(places_, has_it);
  if (held.epoch == 0 || held.divided || found == places_.end()) return -1;
  return static_cast<int>(found - places_.begin());
}

}  // namespace muster::launch
