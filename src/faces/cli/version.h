// SPDX-License-Identifier: BSD-3-Clause
/// What this `muster` was built from.
#pragma once

#include <string>

namespace muster::cli {

/// Versions, a line each: muster with its commit, the torch that it was built for, the compiler.
std::string version_text();
/// One of these lines' values. "none" where the half that needs torch was not built.
std::string torch_version();
std::string compiler_version();
/// The commit of the source tree; empty if that is no checkout of git.
std::string commit();

}  // namespace muster::cli
