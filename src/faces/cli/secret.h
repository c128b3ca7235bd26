/// `muster secret`.
#pragma once

#include <string>
#include <vector>

namespace muster::cli {

int run_secret(const std::vector<std::string>& arguments);

}  // namespace muster::cli
