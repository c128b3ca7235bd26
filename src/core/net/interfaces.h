/// The network interfaces that a job uses: those that the user names, else those that lead to where
/// peers can be.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/net/socket_address.h"

namespace muster {

/// `MUSTER_SOCKET_IFNAME`, else `GLOO_SOCKET_IFNAME`: a comma list; empty where neither is set.
std::vector<std::string> named_interfaces();

/// The address from which this host reaches the world, if there is a way to it. Nothing is sent.
std::optional<SocketAddress> address_of_default_route();

/// One interface's way to a multicast group.
struct GroupInterface {
  unsigned index = 0;
  SocketAddress address;  ///< this host's there, of the group's family
};

/// Loopback, and, where `others_may_come`, the named interfaces, else the one that the system would
/// send to `group` through, else (it knows no way) all that are up and carry multicast. The last
/// one's address reaches furthest. An interface that is named and not there is an error.
Result<std::vector<GroupInterface>> interfaces_towards(const SocketAddress& group,
                                                       bool others_may_come);

}  // namespace muster
