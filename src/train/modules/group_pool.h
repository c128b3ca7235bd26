// SPDX-License-Identifier: BSD-3-Clause
/// A pool of groups for models: reuses the groups of models that no longer exist. A group lives
/// until `destroy_process_group`; without the pool, a process that creates one model after another
/// would accumulate groups.
#pragma once

#include "muster/process_group.h"

namespace muster::parallel {

/// Returns a group of the ranks of `given` with no other user: one that all members have released
/// after equally many calls, otherwise a new one. Every member calls it, in the order of its calls
/// on `given`.
Group acquire_group(const Group& given);

/// Releases a group returned by `acquire_group(given)`, on which this member has nothing in flight.
/// Never blocks.
void release_group(const Group& given, const Group& group);

}  // namespace muster::parallel
