/// Where a rank's links listen. Private to `transport/`.
#pragma once

#include <vector>

#include "core/net/socket_address.h"
#include "core/transport/factory.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::transport {

/// Links listen on the named interfaces; else on the address that routes to the store; else, if the
/// store is a file that other hosts may share, on that of the default route; else on loopback.
/// `others_may_come`: ranks of other hosts can prove that they belong to the job. May ask a
/// resolver, up to the deadline.
Result<std::vector<SocketAddress>> addresses_to_listen_on(const ConnectorOptions& options,
                                                          bool others_may_come, TimePoint deadline);

}  // namespace muster::transport
