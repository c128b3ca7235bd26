// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/node/host.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <filesystem>

#include "core/net/socket_address.h"
#include "core/net/this_host.h"
#include "core/wait/topology.h"

namespace muster::launch {

int allowed_cores() {
  int cores = static_cast<int>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
  if (const auto threads = own_hardware_threads(); !threads.empty())
    cores = static_cast<int>(threads.size());
  const double quota = cpu_quota();
  if (quota > 0) cores = std::min(cores, static_cast<int>(std::ceil(quota)));
  return std::max(1, cores);
}

int gpu_count() {
  int count = 0;
  while (::access(("/dev/nvidia" + std::to_string(count)).c_str(), F_OK) == 0) ++count;
  const char* visible = ::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return count;
  const std::string list = visible;
  if (list.empty() || list == "-1") return 0;
  return std::min(count, static_cast<int>(std::count(list.begin(), list.end(), ',')) + 1);
}

std::string full_host_name() { return muster::full_host_name(); }

bool is_loopback_name(const std::string& name) {
  if (name == "localhost" || name == "localhost.localdomain") return true;
  const auto address = SocketAddress::numeric(name, 0);
  return address.ok() && address->is_loopback();
}

std::string own_program() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).string();
}

namespace {

constexpr int kAttempts = 100;

Descriptor bound(const char* host, std::uint16_t port) {
  const auto address = SocketAddress::numeric(host, port);
  if (!address) return {};
  Descriptor socket(::socket(address->family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  if (!socket) return {};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address->family() == AF_INET6)
    ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  if (::bind(socket.get(), address->raw(), address->length()) != 0) return {};
  return socket;
}

}  // namespace

Result<ReservedPort> ReservedPort::take() {
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    ReservedPort port;
    port.four_ = bound("0.0.0.0", 0);
    if (!port.four_)
      return Status(Code::network,
                    "no port is free for the program's ranks to meet at: " + errno_text(errno));
    const auto address = SocketAddress::local_of(port.four_.get());
    if (!address) return address.status();
    port.number_ = address->port();
    port.six_ = bound("::", port.number_);
    if (port.six_ || !bound("::", 0)) return port;
  }
  return Status(Code::exhausted,
                "no port is free on both IPv4 and IPv6 for the program's ranks to meet at");
}

}  // namespace muster::launch
