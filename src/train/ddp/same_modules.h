// SPDX-License-Identifier: BSD-3-Clause
/// Checks that the ranks train the same module. Buckets are laid out by its parameters; a mismatch
/// would surface in the middle of backward.
#pragma once

#include <string>
#include <vector>

#include "muster/distributed_data_parallel.h"
#include "train/modules/module_parts.h"

namespace muster::parallel {

/// One line for each property that must agree.
std::string described(const std::vector<ModuleParts::Named>& tensors);
std::string described(const DistributedDataParallelOptions& options);

/// The first line in which two descriptions differ, and the ranks that have it so.
std::string first_difference(const std::string& ours, int our_rank, const std::string& theirs,
                             int their_rank);

/// Collective. If the members' descriptions differ, throws on every rank an error that names the
/// first differing line and the rank. `what` is the class being constructed.
void compare_modules(const std::string& what, const Group& group, const std::string& mine);

}  // namespace muster::parallel
