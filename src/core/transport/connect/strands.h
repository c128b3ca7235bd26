// SPDX-License-Identifier: BSD-3-Clause
/// How many connections a link over TCP is made of, and those of one link while they arrive.
///
/// A connection has at most a few MiB in flight: so large the system lets its buffers grow
/// (net.ipv4.tcp_wmem and tcp_rmem, 4 to 6 MiB by default; net.core.wmem_max bounds what a process
/// without privileges may ask for). Over a long way that is less than the link could carry. So the
/// number goes by the round trip, which is known once the socket is connected; no rate is known
/// then (`strands_for`). The connecting side decides, and says it in the greeting of the first
/// connection. The others follow once that one is accepted, with the same proofs and encryption.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/net/link_figures.h"
#include "core/security/handshake.h"
#include "core/transport/byte_stream.h"
#include "core/transport/connect/pending_connection.h"
#include "muster/clock.h"

namespace muster::transport {

/// Whether what is left until the deadline is enough for a bundle: its strands take as many round
/// trips again as the first connection, and if they fail, a single one is begun.
bool has_time_for_bundle(std::chrono::microseconds round_trip, Duration left);

/// How many connections the links of a rank may have besides the first of each: a quarter of the
/// descriptors that its process may open (ulimit -n). The rest is the program's.
std::size_t most_further_strands();

/// Whether a strand as a greeting describes it may be: nothing of it is proved.
bool is_possible(const Handshake::Strand& strand);

/// The connections of a link, in the order of their numbers.
class Bundle {
 public:
  /// `first`: strand 0. It is given up at `limit`.
  Bundle(const Handshake::Strand& first, TimePoint limit) : first_(first), limit_(limit) {
    sockets_.resize(first.of);
  }
  /// Whether the strand is one of these and has not arrived.
  bool lacks(const Handshake::Strand& strand) const;
  void add(std::size_t number, AuthenticatedSocket socket) {
    sockets_[number] = std::move(socket);
    ++arrived_;
  }
  bool is_whole() const { return arrived_ == sockets_.size(); }
  std::size_t size() const { return first_.of; }
  std::size_t missing() const { return size() - arrived_; }
  TimePoint limit() const { return limit_; }
  std::vector<AuthenticatedSocket> take() { return std::move(sockets_); }

 private:
  Handshake::Strand first_;
  TimePoint limit_;
  std::vector<AuthenticatedSocket> sockets_;
  std::size_t arrived_ = 0;
};

/// The encrypted stream over the connections of a link.
std::unique_ptr<ByteStream> stream_over(std::vector<AuthenticatedSocket> sockets);

}  // namespace muster::transport
