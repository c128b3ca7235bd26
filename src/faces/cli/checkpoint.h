/// `muster checkpoint ls|show|verify|convert`: what a folder of checkpoints has, and whether it is
/// whole.
#pragma once

#include <string>
#include <vector>

namespace muster::cli {

/// Arguments after `checkpoint`. 0; 1 where a checkpoint is damaged or cannot be read; 2 for
/// arguments.
int run_checkpoint(const std::vector<std::string>& arguments);

}  // namespace muster::cli
