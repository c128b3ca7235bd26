/// Dividing a group into several, and going on without ranks that are lost.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "muster/base/clock.h"
#include "muster/group/init.h"
#include "muster/group/process_group.h"

namespace muster {

struct SplitGroupOptions {
  std::optional<Duration> timeout =
      {};  ///< of making it, as a whole, and of its calls; absent: the parent's
  std::optional<std::string> backend =
      {};  ///< some of the parent's "device:backend" pairs, or its own text; absent: all of them
  std::shared_ptr<ProcessGroupOptions> pg_options = nullptr;  ///< as in init_process_group
};
/// Divides `parent` (null: the default group). Every member of it calls it with the same lists of
/// ranks of the parent (`split_ranks`), which must not overlap; a difference throws on all, naming
/// both calls. A list's order is the order of its group. A member that is in no list gets a group
/// of rank -1. However many lists: one agreement.
Group split_group(const Group& parent, const std::vector<std::vector<int>>& split_ranks,
                  const SplitGroupOptions& options = {});

struct NewSubgroupsOptions {
  Group group = nullptr;  ///< what is divided; all its members call it
  std::optional<Duration> timeout = {};
  std::optional<std::string> backend = {};
  std::shared_ptr<ProcessGroupOptions> pg_options = nullptr;
};
/// Groups of `group_size` consecutive ranks each; `group_size` absent: one group per host. First
/// this process's own, then all of them (those of others with rank -1). Throws where the number of
/// ranks is not a multiple of `group_size`.
std::pair<Group, std::vector<Group>> new_subgroups(std::optional<int> group_size = {},
                                                   const NewSubgroupsOptions& options = {});
/// Groups of the listed ranks (of the default group), which must not overlap; some ranks may be in
/// none: their own has rank -1.
std::pair<Group, std::vector<Group>> new_subgroups_by_enumeration(
    const std::vector<std::vector<int>>& ranks_per_subgroup_list,
    const NewSubgroupsOptions& options = {});

enum class ShrinkFlags { SHRINK_DEFAULT, SHRINK_ABORT };
struct ShrinkGroupOptions {
  Group group = nullptr;
  ShrinkFlags shrink_flags = ShrinkFlags::SHRINK_DEFAULT;  ///< SHRINK_ABORT: ends first what is in
                                                           ///< flight on the group, on all members
  std::optional<Duration> timeout = {};  ///< of making it and of its calls; absent: the group's
  std::shared_ptr<ProcessGroupOptions> pg_options = nullptr;
};
/// A group of those members of `group` that are left: without the ranks of the group that are
/// listed, and without those that have died or die meanwhile. Every survivor calls it, typically
/// after a call has thrown because of a death; those that are listed must not. The survivors agree
/// among themselves, whoever died: no store and no rank 0 is needed. A living member that does not
/// call is named at the timeout.
///
/// Where the default group is shrunk, the new one takes its place: its ranks are numbered anew from
/// 0, and all other groups end. Errors go on naming ranks by their first numbers. Another group
/// stays as it is and should be destroyed.
Group shrink_group(const std::vector<int>& ranks_to_exclude = {},
                   const ShrinkGroupOptions& options = {});

}  // namespace muster
