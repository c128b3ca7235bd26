/// The debug level: TORCH_DISTRIBUTED_DEBUG, or what the program sets.
#pragma once

namespace muster {

/// Ordered: DETAIL does all that INFO does.
enum class DebugLevel { OFF, INFO, DETAIL };

/// What was set last, else TORCH_DISTRIBUTED_DEBUG; OFF, with a line on standard error, where that
/// cannot be read. Thread-safe, cheap.
DebugLevel get_debug_level();
/// For this process from now on. The log's level follows, unless MUSTER_LOG_LEVEL says what it is.
void set_debug_level(DebugLevel level);

}  // namespace muster
