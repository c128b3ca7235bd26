// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/connect/strands.h"

#include <sys/resource.h>

#include <utility>

namespace muster::transport {
namespace {

// Connect, greetings, TLS and verdict take four. These are for the strands, for what is lost on the
// way, and for a single connection afterwards.
constexpr int kTripsOfABundle = 16;  // limit: of a handshake

constexpr std::size_t kShareOfStrands = 4;  // limit: descriptors of a process

}  // namespace

bool has_time_for_bundle(std::chrono::microseconds round_trip, Duration left) {
  return left >= kTripsOfABundle * Duration(round_trip);
}

std::size_t most_further_strands() {
  rlimit descriptors{};
  if (::getrlimit(RLIMIT_NOFILE, &descriptors) != 0) return 0;
  return descriptors.rlim_cur / kShareOfStrands;
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
