/// How the sockets of the TCP store are set up, on both ends.
#pragma once

#include <cstdint>
#include <string>

#include "muster/base/socket_address.h"

namespace muster::store {

/// Sends small messages at once, and notices a host that has vanished without a word within half a
/// minute.
void tune_tcp(int socket);

/// Under which Unix socket clients of the same host and user find the store that listens at
/// `address`: with its port, and its host unless it listens everywhere.
std::string local_name_of(const SocketAddress& address);
/// The same of a store that listens everywhere.
std::string local_name_of(std::uint16_t port);

}  // namespace muster::store
