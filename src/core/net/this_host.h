// SPDX-License-Identifier: BSD-3-Clause
/// This host in the network: what it is called, and which of its interfaces a job uses.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/net/socket_address.h"

namespace muster {

/// As the kernel has it: "node1"; "localhost" where it has none.
std::string host_name();
/// With its domain where the resolver knows one: "node1.example.org". May ask the name service.
std::string full_host_name();
/// `name` in the domain of this host: "train-0" is "train-0.train.ns.svc.cluster.local" on a host
/// that is called "train-3.train.ns.svc.cluster.local".
std::string in_own_domain(const std::string& name);

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
