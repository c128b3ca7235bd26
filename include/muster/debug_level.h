// SPDX-License-Identifier: BSD-3-Clause
/// The debug level, set by TORCH_DISTRIBUTED_DEBUG or by the program.
#pragma once

namespace muster {

/// Ordered: DETAIL does all that INFO does.
enum class DebugLevel { OFF, INFO, DETAIL };

/// The level that was set last, else that of TORCH_DISTRIBUTED_DEBUG. If the variable is invalid:
/// OFF, with a line on standard error. Thread-safe, cheap.
DebugLevel get_debug_level();
/// Sets the level of this process. The log's level follows, unless MUSTER_LOG_LEVEL is set.
void set_debug_level(DebugLevel level);

}  // namespace muster
