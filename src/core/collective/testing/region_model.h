// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// For models of the region's protocol: explores every state reachable in any order of steps.
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_set>
#include <vector>

namespace muster::collective::region {

struct HashOfState {
  template <class State>
  std::size_t operator()(const State& state) const {
    if constexpr (std::has_unique_object_representations_v<State>) {
      return std::hash<std::string_view>()({reinterpret_cast<const char*>(&state), sizeof state});
    } else {
      return std::hash<std::string_view>()(
          {reinterpret_cast<const char*>(state.data()), state.size() * sizeof state[0]});
    }
  }
};

/// Visits every state that `next` reaches from `first`. Returns an error text, or "". `next`
/// appends the successors, or returns an error text.
template <class State, class Next>
std::string explore(const State& first, Next next, std::size_t* visited = nullptr) {
  std::unordered_set<State, HashOfState> known{first};
  std::vector<State> open{first};
  std::vector<State> successors;
  while (!open.empty()) {
    const State state = open.back();
    open.pop_back();
    successors.clear();
    if (std::string wrong = next(state, successors); !wrong.empty()) return wrong;
    for (const State& successor : successors) {
      if (known.insert(successor).second) open.push_back(successor);
    }
  }
  if (visited != nullptr) *visited = known.size();
  return "";
}

}  // namespace muster::collective::region
