/// How the sockets of the TCP store are set up, on both ends.
#pragma once

namespace muster::store {

/// Sends small messages at once, and notices a host that has vanished without a word within half a
/// minute.
void tune_tcp(int socket);

}  // namespace muster::store
