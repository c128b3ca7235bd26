/// `muster environment`: the environment variables that muster reads, or their page of the
/// documentation.
#pragma once

#include <string>
#include <vector>

namespace muster::cli {

int run_environment(const std::vector<std::string>& arguments);

}  // namespace muster::cli
