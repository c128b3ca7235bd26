// SPDX-License-Identifier: BSD-3-Clause
/// page.html, which CMake compiles in.
#pragma once

#include <string>

namespace muster::cli {

std::string dash_page();

}  // namespace muster::cli
