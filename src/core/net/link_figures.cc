// SPDX-License-Identifier: BSD-3-Clause
#include "core/net/link_figures.h"

// Not <netinet/tcp.h>, whose tcp_info ends before the figures.
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <limits>

namespace muster {

namespace {

std::optional<tcp_info> info_of(int descriptor) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return std::nullopt;
  constexpr std::size_t kNeeded =
      offsetof(tcp_info, tcpi_bytes_retrans) + sizeof info.tcpi_bytes_retrans;
  return length < kNeeded ? std::nullopt : std::optional(info);
}

}  // namespace

std::optional<LinkFigures> link_figures(int descriptor) {
  const auto found = info_of(descriptor);
  if (!found) return std::nullopt;
  const tcp_info& info = *found;
  constexpr auto kUnknown = std::numeric_limits<decltype(info.tcpi_min_rtt)>::max();
  const auto trip = info.tcpi_min_rtt == kUnknown ? 0 : info.tcpi_min_rtt;
  return LinkFigures{.round_trip = std::chrono::microseconds(trip),
                     .bytes_per_s = info.tcpi_delivery_rate,
                     .sent = info.tcpi_bytes_sent,
                     .resent = info.tcpi_bytes_retrans};
}

std::optional<SendPosition> send_position(int descriptor) {
  // In this order: the end of what was written may only be placed too early. The peer never
  // acknowledges an end that lies too far, and might be waited for until more has been written.
  const auto info = info_of(descriptor);
  int waiting = 0;  // bytes, for the network or for the peer's acknowledgement
  if (!info || ::ioctl(descriptor, SIOCOUTQ, &waiting) != 0) return std::nullopt;
  const std::uint64_t acknowledged = info->tcpi_bytes_acked;
  return SendPosition{.written = acknowledged + static_cast<std::uint64_t>(waiting),
                      .acknowledged = acknowledged};
}

std::uint16_t strands_for(std::chrono::microseconds round_trip, Duration trip, std::int64_t most) {
  most = std::clamp<std::int64_t>(most, 1, kMostStrands);
  const Duration way = round_trip;
  if (trip <= Duration::zero() || way <= trip) return 1;
  const auto needed = static_cast<std::int64_t>((way + trip - Duration(1)) / trip);
  return static_cast<std::uint16_t>(std::min(needed, most));
}

}  // namespace muster
