// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/workers/stopped_workers.h"

namespace muster::launch {

std::vector<int> StoppedWorkers::look(TimePoint now, const std::set<int>& stopped) {
  std::vector<int> ended;
  std::erase_if(since_, [&](const auto& each) { return !stopped.contains(each.first); });
  for (const int local_rank : stopped) {
    const auto [entry, first] = since_.emplace(local_rank, now);
    if (!first && now - entry->second >= limit_) ended.push_back(local_rank);
  }
  next_ = stopped.size() > ended.size() ? now + limit_ / kChecksInLimit : TimePoint::max();
  return ended;
}

}  // namespace muster::launch
