// SPDX-License-Identifier: BSD-3-Clause
#include "core/net/link_figures.h"

// Not <netinet/tcp.h>, whose tcp_info ends before the figures.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <limits>

namespace muster {

std::optional<LinkFigures> link_figures(int descriptor) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return std::nullopt;
  constexpr std::size_t kNeeded =
      offsetof(tcp_info, tcpi_bytes_retrans) + sizeof info.tcpi_bytes_retrans;
  if (length < kNeeded) return std::nullopt;
  constexpr auto kUnknown = std::numeric_limits<decltype(info.tcpi_min_rtt)>::max();
  const auto trip = info.tcpi_min_rtt == kUnknown ? 0 : info.tcpi_min_rtt;
  return LinkFigures{.round_trip = std::chrono::microseconds(trip),
                     .bytes_per_s = info.tcpi_delivery_rate,
                     .sent = info.tcpi_bytes_sent,
                     .resent = info.tcpi_bytes_retrans};
}

std::uint16_t strands_for(std::chrono::microseconds round_trip, Duration trip, std::int64_t most) {
  most = std::clamp<std::int64_t>(most, 1, kMostStrands);
  const Duration way = round_trip;
  if (trip <= Duration::zero() || way <= trip) return 1;
  const auto needed = static_cast<std::int64_t>((way + trip - Duration(1)) / trip);
  return static_cast<std::uint16_t>(std::min(needed, most));
}

}  // namespace muster
