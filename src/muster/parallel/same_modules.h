/// Whether the ranks train the same module: gradients are laid out by its parameters, and ranks
/// that do that differently would meet in the middle of backward.
#pragma once

#include <string>
#include <vector>

#include "muster/parallel/distributed_data_parallel.h"

namespace muster::parallel {

/// A line each, of all that must agree.
std::string described(const std::vector<ModuleParts::Named>& tensors);
std::string described(const DistributedDataParallelOptions& options);

/// Collective. Throws on every rank, naming the first line that differs and the rank, where the
/// members' descriptions are not the same. `what`: the class that is being made.
void compare_modules(const std::string& what, const Group& group, const std::string& mine);

}  // namespace muster::parallel
