/// `muster tunables`: the performance numbers in force here, or their page of the documentation.
#pragma once

#include <string>
#include <vector>

namespace muster::cli {

int run_tunables(const std::vector<std::string>& arguments);

}  // namespace muster::cli
