/// Groups that models were given and that are over, for the next model on the same ranks. A group
/// lives until `destroy_process_group` in any case; without this a process that makes one model
/// after another would have more and more of them.
#pragma once

#include "muster/group/process_group.h"

namespace muster::parallel {

/// A group of the ranks of `given` that nobody else uses: one that all members have given back
/// after equally many calls, or else a new one. Every member calls it, in the order of its calls on
/// `given`.
Group take_group(const Group& given);

/// Nothing of this member's is under way on `group`, which `take_group(given)` gave. Never blocks.
void give_group_back(const Group& given, const Group& group);

}  // namespace muster::parallel
