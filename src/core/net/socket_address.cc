// SPDX-License-Identifier: BSD-3-Clause
#include "core/net/socket_address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "core/base/process/limits.h"
#include "core/base/threads/thread_start.h"

namespace muster {
namespace {

const sockaddr_in& v4(const sockaddr* address) {
  return *reinterpret_cast<const sockaddr_in*>(address);
}
const sockaddr_in6& v6(const sockaddr* address) {
  return *reinterpret_cast<const sockaddr_in6*>(address);
}

std::string without_brackets(const std::string& host) {
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']')
    return host.substr(1, host.size() - 2);
  return host;
}

struct FreeInfo {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};

/// getaddrinfo's answer as our addresses, without repetitions.
Result<std::vector<SocketAddress>> look_up(const std::string& host, std::uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  const std::unique_ptr<addrinfo, FreeInfo> owner(list);
  if (error != 0) {
    const std::string reason = error == EAI_SYSTEM ? errno_text(errno) : ::gai_strerror(error);
    return Status(Code::network, "cannot find the address of host \"" + host + "\": " + reason);
  }
  std::vector<SocketAddress> found;
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_family != AF_INET && entry->ai_family != AF_INET6) continue;
    const SocketAddress address(entry->ai_addr, entry->ai_addrlen);
    const bool known = std::any_of(found.begin(), found.end(), [&](const SocketAddress& other) {
      return other.text() == address.text();
    });
    if (!known) found.push_back(address);
  }
  if (found.empty())
    return Status(Code::network, "host \"" + host + "\" has neither an IPv4 nor an IPv6 address");
  return found;
}

Result<SocketAddress> name_of_socket(int socket, bool peer) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  auto* raw = reinterpret_cast<sockaddr*>(&storage);
  const int rc = peer ? ::getpeername(socket, raw, &length) : ::getsockname(socket, raw, &length);
  if (rc != 0)
    return Status(Code::network, "cannot read a socket's " + std::string(peer ? "peer" : "own") +
                                     " address: " + errno_text(errno));
  return SocketAddress(raw, length);
}

}  // namespace

SocketAddress::SocketAddress(const sockaddr* address, socklen_t length) {
  length_ = std::min<socklen_t>(length, sizeof storage_);
  std::memcpy(&storage_, address, length_);
}

Result<SocketAddress> SocketAddress::numeric(const std::string& host, std::uint16_t port) {
  const std::string bare = without_brackets(host);
  in_addr four{};
  // inet_pton and not the resolver: only four dotted numbers are an IPv4 address here, "12345" is a
  // name.
  if (::inet_pton(AF_INET, bare.c_str(), &four) == 1) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr = four;
    return SocketAddress(reinterpret_cast<const sockaddr*>(&address), sizeof address);
  }
  if (bare.find(':') != std::string::npos) {
    if (auto found = look_up(bare, port, AI_NUMERICHOST))
      return found->front();  // knows scopes: fe80::1%eth0
  }
  return Status(Code::invalid_argument, "\"" + host + "\" is not a numeric IPv4 or IPv6 address");
}

Result<SocketAddress> SocketAddress::local_of(int socket) { return name_of_socket(socket, false); }
Result<SocketAddress> SocketAddress::peer_of(int socket) { return name_of_socket(socket, true); }

std::uint16_t SocketAddress::port() const {
  if (family() == AF_INET) return ntohs(v4(raw()).sin_port);
  if (family() == AF_INET6) return ntohs(v6(raw()).sin6_port);
  return 0;
}

bool SocketAddress::is_loopback() const {
  if (family() == AF_INET) return (ntohl(v4(raw()).sin_addr.s_addr) >> 24) == 127;
  if (family() != AF_INET6) return false;
  const in6_addr& address = v6(raw()).sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&address) ||
         (IN6_IS_ADDR_V4MAPPED(&address) && address.s6_addr[12] == 127);
}

bool SocketAddress::is_multicast() const {
  if (family() == AF_INET) return IN_MULTICAST(ntohl(v4(raw()).sin_addr.s_addr));
  return family() == AF_INET6 && IN6_IS_ADDR_MULTICAST(&v6(raw()).sin6_addr);
}

std::string SocketAddress::host() const {
  char text[NI_MAXHOST] = "";
  if (length_ == 0 ||
      ::getnameinfo(raw(), length_, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0)
    return "no address";
  return text;
}

std::string SocketAddress::text() const {
  if (family() == AF_INET6) return "[" + host() + "]:" + std::to_string(port());
  return host() + ":" + std::to_string(port());
}

Result<std::vector<SocketAddress>> ask_resolver(const std::string& host, std::uint16_t port) {
  return look_up(host, port, 0);
}

bool is_of_this_host(const SocketAddress& address) {
  auto unbound = SocketAddress::numeric(address.host(), 0);
  const Descriptor probe(::socket(address.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return probe && unbound && ::bind(probe.get(), unbound->raw(), unbound->length()) == 0;
}

Result<Descriptor> listen_on(const SocketAddress& address, int backlog, bool dual_stack) {
  Descriptor socket(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const auto failed = [&](const char* what) {
    const Code code = errno == EMFILE || errno == ENFILE ? Code::exhausted : Code::network;
    return Status(code,
                  std::string("cannot ") + what + " " + address.text() + ": " + errno_text(errno));
  };
  if (!socket) return failed("make a socket for");
  const int on = 1, only = dual_stack ? 0 : 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address.family() == AF_INET6)
    ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof only);
  if (::bind(socket.get(), address.raw(), address.length()) != 0) return failed("bind to");
  if (::listen(socket.get(), backlog) != 0) return failed("listen on");
  return socket;
}

Result<Descriptor> start_connect(const SocketAddress& address) {
  Descriptor socket(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) {
    const Code code = errno == EMFILE || errno == ENFILE ? Code::exhausted : Code::network;
    return Status(code,
                  "cannot make a socket towards " + address.text() + ": " + errno_text(errno));
  }
  const int on = 1;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (::connect(socket.get(), address.raw(), address.length()) != 0 && errno != EINPROGRESS &&
      errno != EINTR) {
    return Status(Code::network, "cannot connect to " + address.text() + ": " + errno_text(errno));
  }
  return socket;
}

Result<std::vector<SocketAddress>> interface_addresses(const std::string& name) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0)
    return Status(Code::network, "cannot list the network interfaces: " + errno_text(errno));
  struct FreeAddresses {
    void operator()(ifaddrs* entry) const { ::freeifaddrs(entry); }
  };
  const std::unique_ptr<ifaddrs, FreeAddresses> owner(list);
  std::vector<SocketAddress> found;
  std::vector<std::string> names;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (std::find(names.begin(), names.end(), entry->ifa_name) == names.end())
      names.emplace_back(entry->ifa_name);
    if (entry->ifa_addr == nullptr || name != entry->ifa_name) continue;
    if (entry->ifa_addr->sa_family == AF_INET)
      found.emplace_back(entry->ifa_addr, sizeof(sockaddr_in));
    if (entry->ifa_addr->sa_family == AF_INET6)
      found.emplace_back(entry->ifa_addr, sizeof(sockaddr_in6));
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
    return a.family() == AF_INET && b.family() != AF_INET;
  });
  if (!found.empty()) return found;
  std::string there;
  for (const std::string& each : names) there += (there.empty() ? "" : ", ") + each;
  const bool known = std::find(names.begin(), names.end(), name) != names.end();
  return Status(
      Code::invalid_argument,
      known ? "network interface \"" + name +
                  "\" has no IPv4 or IPv6 address; the interfaces here are " + there
            : "there is no network interface \"" + name + "\"; the interfaces here are " + there);
}

Result<SocketAddress> address_towards(const SocketAddress& peer) {
  const Descriptor socket(::socket(peer.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket)
    return Status(Code::network,
                  "cannot make a socket towards " + peer.text() + ": " + errno_text(errno));
  if (::connect(socket.get(), peer.raw(), peer.length()) != 0) {
    return Status(Code::network, "there is no route to " + peer.text() + ": " + errno_text(errno));
  }
  return SocketAddress::local_of(socket.get());
}

// The search for the addresses of a name, and its deadline: `socket_address.h`.

namespace {

using Addresses = Result<std::vector<SocketAddress>>;

bool only_digits(const std::string& host) {
  return !host.empty() &&
         std::all_of(host.begin(), host.end(), [](char c) { return c >= '0' && c <= '9'; });
}

Addresses search(const std::string& host, std::uint16_t port, const Resolver& resolver) {
  if (!only_digits(host)) return resolver(host, port);
  // A closing dot makes the resolver read digits as a name; it must not be handed an address of one
  // number.
  auto found = resolver(host + ".", port);
  if (found) return found;
  return Status(Code::network, "cannot find the address of " + describe_host(host) + ": " +
                                   found.status().message());
}

}  // namespace

std::string describe_host(const std::string& name) {
  return "host \"" + name +
         (only_digits(name) ? "\" (digits only: taken as a name, not as an address)" : "\"");
}

/// Shared with the thread, which may outlive the search.
struct NameSearch::State {
  std::mutex mutex;  // guards `answer`
  std::condition_variable changed;
  std::optional<Addresses> answer;  // set once; its readers need no lock afterwards

  void give(Addresses found) {
    {
      const std::lock_guard lock(mutex);
      answer = std::move(found);
    }
    changed.notify_all();
  }
};

NameSearch::NameSearch(const std::string& host, std::uint16_t port, Resolver resolver)
    : state_(std::make_shared<State>()) {
  if (host.empty()) {
    state_->give(Status(Code::invalid_argument, "the host name is empty"));
  } else if (auto address = SocketAddress::numeric(host, port)) {
    state_->give(std::vector<SocketAddress>{*address});
  } else {
    const bool brackets = host.size() >= 2 && host.front() == '[' && host.back() == ']';
    ask(brackets ? host.substr(1, host.size() - 2) : host, port, std::move(resolver));
  }
}

void NameSearch::ask(std::string name, std::uint16_t port, Resolver resolver) {
  auto thread = start_thread("the thread that finds the address of " + describe_host(name),
                             [state = state_, name, port, resolver = std::move(resolver)] {
                               state->give(search(name, port, resolver));
                             });
  if (!thread.ok()) return state_->give(thread.status());
  thread->detach();
}

const Addresses* NameSearch::wait(TimePoint until) {
  std::unique_lock lock(state_->mutex);
  const auto there = [&] { return state_->answer.has_value(); };
  if (until == TimePoint::max()) {
    state_->changed.wait(lock, there);
  } else {
    state_->changed.wait_until(lock, until, there);
  }
  return state_->answer ? &*state_->answer : nullptr;
}

Addresses resolve(const std::string& host, std::uint16_t port, TimePoint deadline,
                  Resolver resolver) {
  const TimePoint begin = steady_clock().now();
  NameSearch search(host, port, std::move(resolver));
  if (const Addresses* answer = search.wait(deadline)) return *answer;
  return Status(Code::timed_out,
                "cannot find the address of " + describe_host(host) +
                    ": the resolver did not answer within " +
                    describe(steady_clock().now() - begin) +
                    "; check the name and this host's name service, or give a numeric address");
}

}  // namespace muster
