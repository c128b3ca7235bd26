// SPDX-License-Identifier: BSD-3-Clause
/// Host names, numeric addresses and sockets' names, v4 and v6 alike.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/descriptor.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster {

class SocketAddress {
 public:
  SocketAddress() = default;
  SocketAddress(const sockaddr* address, socklen_t length);
  /// "10.0.0.1", "::1" or "[::1]" with a port; numeric only, never asks a resolver.
  static Result<SocketAddress> numeric(const std::string& host, std::uint16_t port);
  /// The socket's own or its peer's name.
  static Result<SocketAddress> local_of(int socket);
  static Result<SocketAddress> peer_of(int socket);

  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t length() const { return length_; }
  int family() const { return storage_.ss_family; }
  std::uint16_t port() const;
  bool is_loopback() const;
  bool is_multicast() const;
  /// Numeric host without port.
  std::string host() const;
  /// "10.0.0.1:29500", "[::1]:29500".
  std::string text() const;

 private:
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

/// Resolves host names: the system's resolver, or one of a test. May block without a limit.
using Resolver =
    std::function<Result<std::vector<SocketAddress>>(const std::string& host, std::uint16_t port)>;
/// `host "NAME"`, for messages; of digits alone it says what they are taken for.
std::string describe_host(const std::string& name);
/// getaddrinfo, for one name.
Result<std::vector<SocketAddress>> ask_resolver(const std::string& host, std::uint16_t port);

/// The search for the addresses of a name, which can be waited for in turns. A host name of digits
/// only ("12345") is a name, not an address (the resolver would read it as 0.0.48.57). Numeric
/// addresses are there at once. A resolver cannot be interrupted, so a name is looked up on a
/// thread of its own, which this object does not wait for when it goes. One thread at a time.
class NameSearch {
 public:
  NameSearch(const std::string& host, std::uint16_t port, Resolver resolver = ask_resolver);
  /// Null when `until` has come before the answer. An answer lists the addresses in the resolver's
  /// order, or is an error naming the host.
  const Result<std::vector<SocketAddress>>* wait(TimePoint until);

 private:
  struct State;
  void ask(std::string name, std::uint16_t port, Resolver resolver);

  std::shared_ptr<State> state_;
};

/// All addresses of a name. At the deadline Code::timed_out, naming the host and the time waited.
Result<std::vector<SocketAddress>> resolve(const std::string& host, std::uint16_t port,
                                           TimePoint deadline, Resolver resolver = ask_resolver);

/// Whether the address belongs to this host, in this network namespace.
bool is_of_this_host(const SocketAddress& address);

/// Non-blocking, close-on-exec listening socket; port 0 picks a free one. IPv6 sockets are v6-only
/// unless `dual_stack`.
Result<Descriptor> listen_on(const SocketAddress& address, int backlog, bool dual_stack = false);
/// Non-blocking connect; completion is for the caller's poll to see.
Result<Descriptor> start_connect(const SocketAddress& address);

/// Addresses of the interface called `name` (IPv4 first). Unknown: an error that lists the
/// interfaces there are.
Result<std::vector<SocketAddress>> interface_addresses(const std::string& name);
/// The local address that a packet to `host` would leave from (UDP connect; nothing is sent).
Result<SocketAddress> address_towards(const SocketAddress& peer);

}  // namespace muster
