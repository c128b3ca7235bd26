// SPDX-License-Identifier: BSD-3-Clause
#include "muster/subgroups.h"

#include <algorithm>
#include <map>
#include <set>

#include "core/group/call/exchange.h"
#include "core/group/creation/backend_registry.h"
#include "core/group/creation/group_creation.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "core/group/job.h"
#include "core/group/resolve.h"
#include "core/group/world.h"

namespace muster {
namespace {

using group::group_or_default;
using group::invalid;

std::string list(const std::vector<std::vector<int>>& lists) {
  std::string out = "[";
  for (const auto& one : lists) out += (out.size() > 1 ? ", " : "") + group::list(one);
  return out + "]";
}

void check_disjoint(const std::vector<std::vector<int>>& lists, int size, const std::string& call) {
  if (lists.empty()) invalid(call + ": the list of groups is empty");
  std::set<int> seen;
  for (const auto& ranks : lists) {
    if (ranks.empty()) invalid(call + ": one of the lists of ranks is empty");
    for (const int rank : ranks) {
      if (rank < 0 || rank >= size)
        invalid(call + ": rank " + std::to_string(rank) + " is not in 0 to " +
                std::to_string(size - 1) + ", the ranks of the group");
      if (!seen.insert(rank).second)
        invalid(call + ": rank " + std::to_string(rank) +
                " is named twice; the groups must not overlap");
    }
  }
}

/// The `wanted` subset of the parent's backends.
BackendConfig part_of(const BackendConfig& have, const std::optional<std::string>& wanted,
                      const std::string& call) {
  if (!wanted) return have;
  auto config = BackendConfig::parse(wanted);
  for (const auto& [device, backend] : config.entries()) {
    const auto theirs = have.for_device(device);
    if (theirs && *theirs == backend) continue;
    invalid(call + ": backend '" + config.text() + "' is not part of the parent's, '" +
            have.text() + "'");
  }
  return config;
}

std::vector<Group> divide(const Group& parent, const std::vector<std::vector<int>>& parts,
                          const std::string& caller, const SplitGroupOptions& options, int& own) {
  const auto scope = World::hold_current();
  const auto job = scope->job(caller);
  if (!parent->is_member())
    invalid(caller + ": this process is not a member of group " + parent->name() +
            ", which it wants to divide");
  check_disjoint(parts, parent->size(), caller);
  const auto deadline = deadline_after(steady_clock(), options.timeout.value_or(parent->timeout()));
  auto config = part_of(core_of(parent).parts().config, options.backend, caller);
  check_pg_options(options.pg_options.get(), config, caller);
  const auto timeout = options.timeout.value_or(parent->timeout());
  group::compare_calls(parent,
                       caller + "(" + list(parts) + ", backend=" + config.text() +
                           ", timeout=" + describe(timeout) + ")",
                       deadline);

  std::vector<Group> groups;
  own = -1;
  std::string name = "none of " + list(parts);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    std::vector<int> ranks;
    for (const int position : parts[i]) ranks.push_back(parent->global_rank_of(position));
    if (std::find(parts[i].begin(), parts[i].end(), parent->rank()) != parts[i].end()) {
      own = static_cast<int>(i);
      name = scope->unique_name(group::name_of(*job, ranks));
      groups.push_back(nullptr);
    } else {
      ProcessGroupParts other;
      other.name = group::name_of(*job, ranks);
      other.ranks = std::move(ranks);
      other.config = config;
      other.timeout = timeout;
      groups.push_back(std::make_shared<GroupCore>(std::move(other)));
    }
  }
  auto mine = group::split_group(job, *parent, parts, own, std::move(name), std::move(config),
                                 timeout, {.pg_options = options.pg_options, .deadline = deadline});
  if (own >= 0) {
    scope->add(mine);
    groups[static_cast<std::size_t>(own)] = std::move(mine);
  }
  return groups;
}

Group no_group(const Group& parent) {
  ProcessGroupParts parts;
  parts.name = "none of the parts of " + parent->name();
  parts.config = core_of(parent).parts().config;
  parts.timeout = parent->timeout();
  return std::make_shared<GroupCore>(std::move(parts));
}

std::pair<Group, std::vector<Group>> with_own(const Group& parent, std::vector<Group> groups,
                                              int own) {
  auto mine = own >= 0 ? groups[static_cast<std::size_t>(own)] : no_group(parent);
  return {std::move(mine), std::move(groups)};
}

}  // namespace

Group split_group(const Group& parent, const std::vector<std::vector<int>>& split_ranks,
                  const SplitGroupOptions& options) {
  const auto from = group_or_default(parent, "split_group");
  int own = -1;
  auto groups = divide(from, split_ranks, "split_group", options, own);
  return with_own(from, std::move(groups), own).first;
}

std::pair<Group, std::vector<Group>> new_subgroups(std::optional<int> group_size,
                                                   const NewSubgroupsOptions& options) {
  const auto parent = group_or_default(options.group, "new_subgroups");
  if (!parent->is_member())
    invalid("new_subgroups: this process is not a member of group " + parent->name());
  const int size = parent->size();
  std::vector<std::vector<int>> parts;
  if (group_size) {
    if (*group_size < 1 || *group_size > size || size % *group_size != 0)
      invalid("new_subgroups: " + std::to_string(size) +
              " ranks cannot be divided into groups of " + std::to_string(*group_size));
    parts.resize(static_cast<std::size_t>(size / *group_size));
    for (int rank = 0; rank < size; ++rank)
      parts[static_cast<std::size_t>(rank / *group_size)].push_back(rank);
  } else {
    const auto job = World::current().job("new_subgroups");
    std::map<int, std::vector<int>> of_host;
    for (int rank = 0; rank < size; ++rank)
      of_host[group::host_of(*job, parent->global_rank_of(rank))].push_back(rank);
    for (auto& [host, ranks] : of_host) parts.push_back(std::move(ranks));
  }
  int own = -1;
  auto groups = divide(parent, parts, "new_subgroups",
                       {options.timeout, options.backend, options.pg_options}, own);
  return with_own(parent, std::move(groups), own);
}

std::pair<Group, std::vector<Group>> new_subgroups_by_enumeration(
    const std::vector<std::vector<int>>& ranks_per_subgroup_list,
    const NewSubgroupsOptions& options) {
  const auto parent = group_or_default(options.group, "new_subgroups_by_enumeration");
  if (!parent->is_member())
    invalid("new_subgroups_by_enumeration: this process is not a member of group " +
            parent->name());
  auto parts = ranks_per_subgroup_list;
  for (auto& ranks : parts) {
    for (auto& rank : ranks) rank = parent->group_rank_of(rank);
    std::sort(ranks.begin(), ranks.end());
  }
  int own = -1;
  auto groups = divide(parent, parts, "new_subgroups_by_enumeration",
                       {options.timeout, options.backend, options.pg_options}, own);
  return with_own(parent, std::move(groups), own);
}

Group shrink_group(const std::vector<int>& ranks_to_exclude, const ShrinkGroupOptions& options) {
  const auto scope = World::hold_current();
  const auto job = scope->job("shrink_group");
  const auto world = scope->world("shrink_group");
  const auto old = options.group ? options.group : world;
  if (!old->is_member())
    invalid("shrink_group: this process is not a member of group " + old->name());
  std::set<int> excluded;
  for (const int rank : ranks_to_exclude) {
    old->global_rank_of(rank);  // throws if there is no such rank
    if (!excluded.insert(rank).second)
      invalid("shrink_group: ranks_to_exclude names rank " + std::to_string(rank) + " twice");
    if (rank == old->rank())
      invalid("shrink_group: rank " + std::to_string(rank) +
              " of the group is to be excluded and must not call it; destroy the group instead");
  }
  check_pg_options(options.pg_options.get(), core_of(old).parts().config, "shrink_group");
  if (options.shrink_flags == ShrinkFlags::SHRINK_ABORT)
    core_of(old).abort("shrink_group was called with SHRINK_ABORT");
  const bool is_default_group = old == world;
  auto shrunk = group::shrink_group(job, *old, ranks_to_exclude, is_default_group,
                                    options.timeout.value_or(old->timeout()), options.pg_options);
  if (is_default_group) {
    abort_groups(scope->replace(shrunk.job, shrunk.group), "the default group was shrunk");
  } else {
    scope->add(shrunk.group);
  }
  return shrunk.group;
}

namespace {

/// `group`: null on a rank that joins.
void check_grown_ranks(const std::vector<int>& ranks, const ProcessGroup* group, int rank,
                       int world_size) {
  const auto fail = [&](const std::string& why) {
    invalid("grow_group: ranks " + group::list(ranks) + " " + why);
  };
  std::set<int> seen;
  for (const int one : ranks) {
    if (one < 0 || one >= world_size)
      fail("are not all in 0 to " + std::to_string(world_size - 1) +
           ", the ranks of the default group");
    if (!seen.insert(one).second) fail("name rank " + std::to_string(one) + " twice");
  }
  if (!seen.contains(rank))
    fail("do not name rank " + std::to_string(rank) + ", which must then not call it");
  if (group == nullptr) return;
  const auto members = group->ranks();
  if (ranks.size() > members.size() && std::equal(members.begin(), members.end(), ranks.begin()))
    return;
  fail("must begin with those of group " + group->name() + ", " + group::list(members) +
       ", and name at least one more");
}

}  // namespace

Group grow_group(const std::vector<int>& ranks, const GrowGroupOptions& options) {
  const auto scope = World::hold_current();
  const auto world = scope->world("grow_group");
  const auto job = scope->job("grow_group");
  check_grown_ranks(ranks, options.group.get(), job->rank, job->world_size);
  auto config =
      options.backend ? BackendConfig::parse(options.backend) : core_of(world).parts().config;
  group::check_available(config);
  check_pg_options(options.pg_options.get(), config, "grow_group");
  const auto timeout = options.timeout.value_or(config.default_timeout());
  auto call = "grow_group(ranks=" + group::list(ranks) + ", backend=" + config.text() +
              ", timeout=" + describe(timeout) + ")";
  const bool is_member = options.group != nullptr && options.group->is_member();
  return group::create_group(*scope, job,
                             {.call = std::move(call),
                              .ranks = ranks,
                              .config = std::move(config),
                              .timeout = timeout,
                              .members_only = true},
                             {.pg_options = options.pg_options,
                              .deadline = deadline_after(steady_clock(), timeout),
                              .device_id = options.device_id,
                              .grows = true,
                              .grown_from = is_member ? options.group : nullptr});
}

}  // namespace muster
