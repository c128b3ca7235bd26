/// Checks that options belong to a backend of the group.
#pragma once

#include <string_view>

#include "muster/backend_name.h"

namespace muster {

/// Throws DistBackendError (Code::unsupported), naming both, if no backend of `config` accepts
/// `options`. Null is always accepted.
void check_pg_options(const ProcessGroupOptions* options, const BackendConfig& config,
                      std::string_view caller);

}  // namespace muster
