// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/version.h"

namespace muster {

std::string_view version() { return MUSTER_VERSION; }

}  // namespace muster
