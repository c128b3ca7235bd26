// SPDX-License-Identifier: BSD-3-Clause
/// Socket options of the TCP store, for both ends.
#pragma once

#include <cstdint>
#include <string>

#include "core/net/socket_address.h"

namespace muster::store {

/// Disables Nagle's algorithm and detects a vanished host within 30 s.
void tune_tcp(int socket);

/// Name of the Unix socket through which clients of the same host and user reach the store
/// listening at `address`: contains its port, and its host unless it listens on all interfaces.
std::string local_name_of(const SocketAddress& address);
/// As above, for a store that listens on all interfaces.
std::string local_name_of(std::uint16_t port);

}  // namespace muster::store
