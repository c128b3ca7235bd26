#include "core/transport/connect/listen_addresses.h"

#include <string>

#include "core/net/this_host.h"

namespace muster::transport {

Result<std::vector<SocketAddress>> addresses_to_listen_on(const ConnectorOptions& options,
                                                          bool others_may_come,
                                                          TimePoint deadline) {
  std::vector<SocketAddress> addresses;
  for (const std::string& name : options.interfaces) {
    auto found = interface_addresses(name);
    if (!found) return found.status().with_context("choosing the network interfaces for links");
    addresses.push_back(found->front());
  }
  if (!addresses.empty()) return addresses;
  if (others_may_come && options.any_host && options.towards.empty()) {
    if (const auto address = address_of_default_route())
      return std::vector<SocketAddress>{*SocketAddress::numeric(address->host(), 0)};
  }
  if (others_may_come && !options.towards.empty()) {
    auto target = resolve(options.towards, 9, deadline);
    if (!target)
      return target.status().with_context(
          "choosing the address for links, the one that routes to the store");
    for (const SocketAddress& each : *target) {
      if (auto address = address_towards(each))
        return std::vector<SocketAddress>{*SocketAddress::numeric(address->host(), 0)};
    }
    return address_towards(target->front())
        .status()
        .with_context("choosing the address for links, the one that routes to the store");
  }
  for (const char* loopback : {"127.0.0.1", "::1"}) {
    const auto address = SocketAddress::numeric(loopback, 0);
    if (address.ok() && listen_on(*address, 1).ok()) return std::vector<SocketAddress>{*address};
  }
  return Status(Code::network,
                "this host has no loopback address to listen on (is the interface lo up?)");
}

}  // namespace muster::transport
