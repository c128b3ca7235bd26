// SPDX-License-Identifier: BSD-3-Clause
#include "core/net/this_host.h"

#include <ifaddrs.h>
#include <limits.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "core/base/environment.h"

namespace muster {

std::string host_name() {
  char name[HOST_NAME_MAX + 1] = {};
  if (::gethostname(name, sizeof name - 1) != 0 || name[0] == '\0') return "localhost";
  return name;
}

std::string full_host_name() {
  const std::string plain = host_name();
  if (plain.find('.') != std::string::npos) return plain;
  addrinfo hints{};
  hints.ai_flags = AI_CANONNAME;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(plain.c_str(), nullptr, &hints, &found) != 0) return plain;
  // A hosts file that calls everything "localhost" says nothing about this host.
  const std::string canonical = found->ai_canonname != nullptr ? found->ai_canonname : "";
  ::freeaddrinfo(found);
  return canonical.starts_with(plain + ".") ? canonical : plain;
}

std::string in_own_domain(const std::string& name) {
  const std::string own = full_host_name();
  const std::size_t dot = own.find('.');
  return dot == std::string::npos ? name : name + own.substr(dot);
}

namespace {

struct InterfaceEntry {
  std::string name;
  unsigned flags = 0;
  GroupInterface of;
};

/// Those that are up, one address of each: of several the one that is not of this link alone.
Result<std::vector<InterfaceEntry>> entries_of(int family) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0)
    return Status(Code::network, "cannot list the network interfaces: " + errno_text(errno));
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
  std::vector<InterfaceEntry> entries;
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != family ||
        (each->ifa_flags & IFF_UP) == 0)
      continue;
    const SocketAddress address(each->ifa_addr,
                                family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    const auto known =
        std::find_if(entries.begin(), entries.end(),
                     [&](const InterfaceEntry& entry) { return entry.name == each->ifa_name; });
    if (known == entries.end()) {
      entries.push_back(
          {each->ifa_name, each->ifa_flags, {::if_nametoindex(each->ifa_name), address}});
    } else if (known->of.address.host().find('%') != std::string::npos) {
      known->of.address = address;
    }
  }
  return entries;
}

}  // namespace

std::vector<std::string> named_interfaces() {
  auto text = env_text("MUSTER_SOCKET_IFNAME");
  if (!text) text = env_text("GLOO_SOCKET_IFNAME");
  std::vector<std::string> names;
  if (!text) return names;
  for (std::size_t at = 0; at <= text->size();) {
    const auto end = std::min(text->find(',', at), text->size());
    if (end > at) names.push_back(text->substr(at, end - at));
    at = end + 1;
  }
  return names;
}

std::optional<SocketAddress> address_of_default_route() {
  for (const char* anywhere : {"198.51.100.1", "2001:db8::1"}) {  // documentation's
    const auto target = SocketAddress::numeric(anywhere, 9);
    if (!target) continue;
    const auto address = address_towards(*target);
    if (address && !address->is_loopback()) return *address;
  }
  return {};
}

Result<std::vector<GroupInterface>> interfaces_towards(const SocketAddress& group,
                                                       bool others_may_come) {
  const auto entries = entries_of(group.family());
  if (!entries) return entries.status();
  std::vector<GroupInterface> chosen;
  for (const InterfaceEntry& entry : *entries) {
    if ((entry.flags & IFF_LOOPBACK) != 0) chosen.push_back(entry.of);
  }
  if (!others_may_come) return chosen;
  const auto add = [&](const auto& wanted) {
    bool found = false;
    for (const InterfaceEntry& entry : *entries) {
      if ((entry.flags & IFF_LOOPBACK) != 0 || !wanted(entry)) continue;
      chosen.push_back(entry.of);
      found = true;
    }
    return found;
  };
  if (const auto names = named_interfaces(); !names.empty()) {
    for (const std::string& name : names) {
      if (add([&](const InterfaceEntry& entry) { return entry.name == name; })) continue;
      if (const auto there = interface_addresses(name); !there) return there.status();
    }
    return chosen;
  }
  const auto way = address_towards(group);
  const bool routed = way && add([&](const InterfaceEntry& entry) {
                        return entry.of.address.host() == way->host();
                      });
  if (!routed) add([](const InterfaceEntry& entry) { return (entry.flags & IFF_MULTICAST) != 0; });
  return chosen;
}

}  // namespace muster
