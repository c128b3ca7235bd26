// SPDX-License-Identifier: BSD-3-Clause
#include "core/net/link_figures.h"

// Not <netinet/tcp.h>, whose tcp_info ends before the figures.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>

namespace muster {

std::optional<LinkFigures> link_figures(int descriptor) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return std::nullopt;
  constexpr std::size_t kNeeded =
      offsetof(tcp_info, tcpi_bytes_retrans) + sizeof info.tcpi_bytes_retrans;
  if (length < kNeeded) return std::nullopt;
  return LinkFigures{.round_trip = std::chrono::microseconds(info.tcpi_min_rtt),
                     .bytes_per_s = info.tcpi_delivery_rate,
                     .sent = info.tcpi_bytes_sent,
                     .resent = info.tcpi_bytes_retrans};
}

}  // namespace muster
