// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/connect/strands.h"

#include <algorithm>
#include <utility>

namespace muster::transport {
namespace {

// Connect, greetings, TLS and verdict take four. These are for the strands, for what is lost on the
// way, and for a single connection afterwards.
constexpr int kTripsOfABundle = 16;  // limit: of a handshake

}  // namespace

std::uint16_t strands_for(std::chrono::microseconds round_trip, Duration trip, std::int64_t most) {
  most = std::clamp<std::int64_t>(most, 1, kMostStrands);
  const Duration way = round_trip;
  if (trip <= Duration::zero() || way <= trip) return 1;
  const auto needed = static_cast<std::int64_t>((way + trip - Duration(1)) / trip);
  return static_cast<std::uint16_t>(std::min(needed, most));
}

bool has_time_for_bundle(std::chrono::microseconds round_trip, Duration left) {
  return left >= kTripsOfABundle * Duration(round_trip);
}

bool is_possible(const Handshake::Strand& strand) {
  return strand.number < strand.of && strand.of <= kMostStrands;
}

bool Bundle::lacks(const Handshake::Strand& strand) const {
  return strand.of == first_.of && strand.bundle == first_.bundle &&
         strand.number < sockets_.size() && !sockets_[strand.number].socket;
}

std::unique_ptr<ByteStream> stream_over(std::vector<AuthenticatedSocket> sockets) {
  std::vector<std::unique_ptr<ByteStream>> strands;
  for (AuthenticatedSocket& each : sockets)
    strands.push_back(
        make_tls_stream(make_tcp_stream(std::move(each.socket)), std::move(*each.tls)));
  if (strands.size() == 1) return std::move(strands.front());
  return make_bundle_stream(std::move(strands));
}

}  // namespace muster::transport
