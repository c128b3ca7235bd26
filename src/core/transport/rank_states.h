// SPDX-License-Identifier: BSD-3-Clause
/// The state of every rank of the job. Private to `transport/`; under the engine's lock.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "muster/status.h"

namespace muster::transport {

class RankStates {
 public:
  explicit RankStates(int world_size)
      : gone_(static_cast<std::size_t>(world_size)),
        deaths_(static_cast<std::size_t>(world_size)),
        posted_from_(static_cast<std::size_t>(world_size)) {}

  /// Why nothing can come from or go to `rank` any more: it is dead, or it has left. Success while
  /// it is there.
  const Status& gone(int rank) const { return gone_[static_cast<std::size_t>(rank)]; }
  const Status& death(int rank) const { return deaths_[static_cast<std::size_t>(rank)]; }
  void set_gone(int rank, const Status& why) { gone_[static_cast<std::size_t>(rank)] = why; }
  void set_dead(int rank, const Status& why) { deaths_[static_cast<std::size_t>(rank)] = why; }

  /// Notes the death of a rank that no transfer needs: it may have left in good order. It is judged
  /// once a transfer needs the rank.
  void note_unneeded_death(int rank, Status evidence) {
    unneeded_deaths_[rank] = std::move(evidence);
  }
  void forget_unneeded_death(int rank) { unneeded_deaths_.erase(rank); }
  bool has_unneeded_deaths() const { return !unneeded_deaths_.empty(); }
  std::optional<Status> take_unneeded_death(int rank) {
    const auto found = unneeded_deaths_.find(rank);
    if (found == unneeded_deaths_.end()) return std::nullopt;
    return std::move(unneeded_deaths_.extract(found).mapped());
  }

  /// Receives that wait for a message of `rank`.
  int posted_from(int rank) const { return posted_from_[static_cast<std::size_t>(rank)]; }
  void count_posted(int rank, int change) {
    posted_from_[static_cast<std::size_t>(rank)] += change;
  }

 private:
  std::vector<Status> gone_;
  std::vector<Status> deaths_;
  std::vector<int> posted_from_;
  std::map<int, Status> unneeded_deaths_;
};

}  // namespace muster::transport
