// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/workers/held_states.h"

#include <algorithm>

namespace muster::launch {

void HeldStates::begin(int place) {
  PlaceState& at = places_[static_cast<std::size_t>(place)];
  at.gone_in = at.ended_with();
  at.ended = at.left = false;
  if (!at.in_memory) at.state = {};
}

void HeldStates::end(int place) { places_[static_cast<std::size_t>(place)].ended = true; }

void HeldStates::take(int place, const WorkerWords& words, bool keeps_count) {
  PlaceState& at = places_[static_cast<std::size_t>(place)];
  if (words.memories) at.in_memory = !words.memories->empty();
  if (!at.in_memory) at.kept_in = 0;
  if (at.left) return;
  if (words.lost > 0) {
    at.state = {};
    at.gone_in = 0;
    if (!keeps_count) committed_ = 0;
  }
  committed_ = std::max(committed_, words.committed);
  if (words.state.epoch > 0) at.state = words.state;
  if (newest().epoch == 0) return;
  kept_commit_in_ = 0;
  for (PlaceState& each : places_) each.kept_in = 0;
}

void HeldStates::leave() {
  left_in_ = std::max(left_in_, newest().epoch);  // a commit may be given after a second `leave`
  for (PlaceState& each : places_) {
    if (each.in_memory) each.kept_in = std::max(each.kept_in, each.state.epoch);
    each.state = {};
    each.gone_in = 0;
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

std::int64_t HeldStates::gone_in() const {
  const HeldState held = newest();
  if (held.epoch > 0 && !held.divided) return 0;
  std::int64_t gone = 0;
  for (const PlaceState& each : places_) gone = std::max(gone, each.ended_with());
  return gone >= held.epoch ? gone : 0;
}

std::int64_t HeldStates::kept_in() const {
  std::int64_t newest = kept_commit_in_;
  for (const PlaceState& each : places_) newest = std::max(newest, each.kept_in);
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
