// SPDX-License-Identifier: BSD-3-Clause
/// Which muster this is.
#pragma once

#include <string_view>

namespace muster {

/// As "0.1.0".
std::string_view version();

}  // namespace muster
