/// TORCH_DISTRIBUTED_DEBUG, and the log level that it gives together with TORCH_CPP_LOG_LEVEL.
#pragma once

#include <string_view>

#include "core/base/log/log.h"
#include "muster/debug_level.h"
#include "muster/status.h"

namespace muster {

/// OFF, INFO, DETAIL in any case, OFF where it is not set; anything else is Code::invalid_argument
/// naming the variable.
Result<DebugLevel> debug_level_from_environment();
/// The documents' table: ERROR, WARNING (the default) and INFO give error, warning, info; INFO with
/// debug level INFO gives debug, with DETAIL trace. FATAL counts as ERROR; the numbers 0 to 3 stand
/// for INFO to FATAL.
LogLevel log_level_for(std::string_view cpp_log_level, DebugLevel debug);
/// From MUSTER_LOG_LEVEL, else as `log_level_for` says.
LogLevel log_level_from_environment();

}  // namespace muster
