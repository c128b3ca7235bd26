// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "muster/init.h"
#include "train/fsdp/sharded_unit_state.h"

namespace muster::parallel {
namespace {

/// Collective among `ranks`, of the default group.
Group group_like(const Group& given, const std::vector<int>& ranks) {
  return new_group({.ranks = ranks,
                    .timeout = given->timeout(),
                    .backend = given->backend(),
                    .pg_options = nullptr,
                    .use_local_synchronization = true,
                    .sort_ranks = false});
}

}  // namespace

std::pair<std::shared_ptr<ShardedUnit::Family>, Group> ShardedUnit::Family::of(const Group& given) {
  static std::mutex mutex;
  static std::map<std::weak_ptr<ProcessGroup>, std::shared_ptr<Family>, std::owner_less<>> families;
  {
    const std::lock_guard lock(mutex);
    std::erase_if(families, [](const auto& entry) { return entry.first.expired(); });
    if (const auto found = families.find(given); found != families.end())
      if (const Group group = found->second->group.lock(); group && group->failure().ok())
        return {found->second, group};
  }
  const Group group = group_like(given, given->ranks());
  const auto family = std::make_shared<Family>();
  family->group = group;
  const std::lock_guard lock(mutex);
  families[given] = family;
  return {family, group};
}

Group ShardedUnit::Family::alone(const Group& given) {
  static std::mutex mutex;
  static std::map<std::weak_ptr<ProcessGroup>, Group, std::owner_less<>> groups;
  {
    const std::lock_guard lock(mutex);
    std::erase_if(groups, [](const auto& entry) { return entry.first.expired(); });
    if (const auto found = groups.find(given);
        found != groups.end() && found->second->failure().ok())
      return found->second;
  }
  const Group alone = group_like(given, {given->global_rank_of(given->rank())});
  const std::lock_guard lock(mutex);
  groups[given] = alone;
  return alone;
}

Group ShardedUnit::Family::part(int size) {
  const Group whole = group.lock();
  if (size < 1 || whole->size() % size != 0)
    refuse_unit("reshard_after_forward is " + std::to_string(size) +
                ", which does not divide the " + std::to_string(whole->size()) +
                " ranks that share the parameters");
  if (const Group known = parts[size].lock(); known && known->failure().ok()) return known;
  const auto ranks = whole->ranks();
  const auto first = ranks.begin() + whole->rank() / size * size;
  const Group made = group_like(whole, std::vector<int>(first, first + size));
  parts[size] = made;
  return made;
}

/// The outermost unit's forward begins.
void ShardedUnit::Family::begin_pass() {
  drop_prefetched();
  began_before = std::exchange(began, {});
  ended.clear();
}

void ShardedUnit::Family::finish_reduction() {
  const auto unit = std::exchange(reducing, {}).lock();
  if (!unit) return;
  const std::lock_guard lock(unit->mutex);
  unit->parameters.finish_reduction();
  unit->record(ShardedEvent::reduced);
}

/// Frees what was gathered ahead and not used.
void ShardedUnit::Family::drop_prefetched() {
  for (const auto& each : units) {
    const auto unit = each.lock();
    if (!unit) continue;
    const std::lock_guard lock(unit->mutex);
    if (std::exchange(unit->is_prefetched, false) && !unit->parameters.is_unsharded())
      unit->parameters.reshard(Keep::nothing);
  }
}

}  // namespace muster::parallel
