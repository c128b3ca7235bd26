// SPDX-License-Identifier: BSD-3-Clause
/// A browser names in the header "Host" the host that it believes to ask. A foreign page whose name
/// has been resolved to 127.0.0.1 is told by it.
#pragma once

#include <string_view>

namespace muster::cli {

/// Whether a Host header's value is a name of the loopback interface, with or without a port.
bool is_loopback_host(std::string_view host);

}  // namespace muster::cli
