// SPDX-License-Identifier: BSD-3-Clause
/// Divides a group into several, shrinks a group after the loss of ranks, and lets others join it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "muster/clock.h"
#include "muster/init.h"
#include "muster/process_group.h"

namespace muster {

struct SplitGroupOptions {
  /// Applies to the creation as a whole and to the new group's calls. Default: the parent's.
  std::optional<Duration> timeout = {};
  /// A subset of the parent's "device:backend" pairs, or its own text. Default: all of them.
  std::optional<std::string> backend = {};
  std::shared_ptr<ProcessGroupOptions> pg_options = nullptr;  ///< as in init_process_group
};
/// Divides `parent` (null: the default group). Every member calls it with the same lists of the
/// parent's ranks, which must not overlap; a mismatch throws on all of them and names both calls.
/// Group ranks follow the order of each list. Returns the caller's group; a member in no list gets
/// a group whose rank is -1. Takes one round of agreement, however many lists there are.
Group split_group(const Group& parent, const std::vector<std::vector<int>>& split_ranks,
                  const SplitGroupOptions& options = {});

struct NewSubgroupsOptions {
  Group group = nullptr;  ///< the group to divide; all its members call it
  std::optional<Duration> timeout = {};
  std::optional<std::string> backend = {};
  std::shared_ptr<ProcessGroupOptions> pg_options = nullptr;
};
/// Makes groups of `group_size` consecutive ranks; without `group_size`, one group per host.
/// Returns the caller's own group, then all groups; groups of other ranks have rank -1. Throws if
/// `group_size` does not divide the number of ranks.
std::pair<Group, std::vector<Group>> new_subgroups(std::optional<int> group_size = {},
                                                   const NewSubgroupsOptions& options = {});
/// Makes groups of the listed ranks of the default group, which must not overlap. A rank in no list
/// gets an own group whose rank is -1.
std::pair<Group, std::vector<Group>> new_subgroups_by_enumeration(
    const std::vector<std::vector<int>>& ranks_per_subgroup_list,
    const NewSubgroupsOptions& options = {});

enum class ShrinkFlags { SHRINK_DEFAULT, SHRINK_ABORT };
struct ShrinkGroupOptions {
  Group group = nullptr;
  /// SHRINK_ABORT first aborts everything in flight on the group, on all members.
  ShrinkFlags shrink_flags = ShrinkFlags::SHRINK_DEFAULT;
  /// Applies to the creation and to the new group's calls. Default: the group's.
  std::optional<Duration> timeout = {};
  std::shared_ptr<ProcessGroupOptions> pg_options = nullptr;
};
/// Creates a group of the surviving members of `group`: all except `ranks_to_exclude` (ranks of the
/// group) and those that have died or die during the call. Every survivor calls it, typically after
/// a call threw because of a death; excluded ranks must not. The survivors agree among themselves
/// without a store and without rank 0. On timeout, the error names the live members that did not
/// call.
///
/// Shrinking the default group replaces it: ranks are renumbered from 0, and all other groups end.
/// Errors keep naming ranks by their original numbers. Shrinking another group leaves it as it is;
/// destroy it afterwards.
Group shrink_group(const std::vector<int>& ranks_to_exclude = {},
                   const ShrinkGroupOptions& options = {});

struct GrowGroupOptions {
  /// The group that grows. Ranks that join leave it out, or give what they got as non-members.
  Group group = nullptr;
  /// Applies to the creation and to the new group's calls. Default: 30 minutes; 10 minutes if nccl
  /// is the only backend.
  std::optional<Duration> timeout = {};
  std::optional<std::string> backend = {};                    ///< default: the default group's
  std::shared_ptr<ProcessGroupOptions> pg_options = nullptr;  ///< as in init_process_group
  std::optional<at::Device> device_id = {};                   ///< as in init_process_group
};
/// Creates a group of the members of `group` and of ranks that join it. `ranks`, of the default
/// group, lists the members in their order and then those that join; group ranks follow it, so that
/// members keep theirs. All of `ranks` call it with the same list, backend and timeout; others must
/// not. Backend nccl grows the members' communicator if NCCL can (2.29), with none of their calls
/// in flight; otherwise all ranks connect anew. `group` stays as it is; destroy it afterwards.
///
/// Throws DistBackendError on all ranks if the group that a rank comes from has failed, if a rank
/// dies or does not call by the timeout, or if members name different groups.
Group grow_group(const std::vector<int>& ranks, const GrowGroupOptions& options = {});

}  // namespace muster
