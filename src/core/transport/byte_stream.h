// SPDX-License-Identifier: BSD-3-Clause
/// One side of an established, authenticated, ordered and reliable connection to one peer, and its
/// kinds. Private to `transport/` and to the simulator: everything above speaks messages
/// (`channel.h`).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/base/bytes.h"
#include "core/base/process/fork_guard.h"
#include "core/net/link_figures.h"
#include "muster/status.h"

namespace muster {
class TlsSession;
namespace shm {
class HostRegion;
}  // namespace shm
}  // namespace muster

namespace muster::transport {

class ByteStream {
 public:
  virtual ~ByteStream() = default;

  /// Writes as much of the pieces, in order, as fits now and returns the number of bytes; 0 if
  /// nothing fits. Never blocks. A failure is final.
  virtual Result<std::size_t> write(std::span<const ConstBytes> pieces) = 0;
  /// Reads the available bytes into the pieces, in order, and returns their number; 0 if there are
  /// none. Never blocks. Code::closed at the end of the stream, after all bytes before it were
  /// read. A failure is final.
  virtual Result<std::size_t> read(std::span<const MutableBytes> pieces) = 0;

  /// Received bytes that can be read in place, in order. They stay valid until they are read or
  /// dropped. Empty for streams that do not keep received bytes in memory.
  virtual std::array<ConstBytes, 2> look() { return {}; }
  /// Consumes the first `bytes` of what `look` has just returned.
  virtual void drop([[maybe_unused]] std::size_t bytes) {}

  /// Whether bytes accepted by `write` are still buffered. The next `write` (possibly an empty one)
  /// sends them, once the descriptor is writable.
  virtual bool has_unsent() const { return false; }
  /// Whether `write` takes nothing more until the descriptor has news.
  virtual bool full() const { return has_unsent(); }
  /// Whether `read` has bytes, or an end to report, although the descriptor is not readable.
  virtual bool holds_more() const { return false; }

  /// For epoll: readable when `read` may make progress. -1 if the owner's mailbox is woken instead.
  virtual int descriptor() const = 0;
  /// "tcp", "shm", "loopback" or "sim", for messages and tests. A TLS stream has its wire's kind.
  virtual const char* kind() const = 0;
  /// As the kernel has measured them; absent unless the bytes travel over TCP.
  virtual std::optional<LinkFigures> figures() const {
    return descriptor() < 0 ? std::nullopt : link_figures(descriptor());
  }
  /// How far each connection below has come, in the same order each time; none unless the bytes
  /// travel over TCP.
  virtual std::vector<SendPosition> send_positions() const {
    const auto only = descriptor() < 0 ? std::nullopt : send_position(descriptor());
    return only ? std::vector{*only} : std::vector<SendPosition>();
  }
};

/// A plain byte stream over a connected socket. Between processes it carries a TLS stream. `socket`
/// is connected; made non-blocking and without Nagle's delay here.
std::unique_ptr<ByteStream> make_tcp_stream(GuardedDescriptor socket);

/// A byte stream encrypted with a `TlsSession` over another stream. Knows no sockets: tests run it
/// over memory. `session` has finished its handshake; bytes that it holds in either direction begin
/// the stream.
///
/// Tampered data is Code::refused, with a sentence that says so, and final.
std::unique_ptr<ByteStream> make_tls_stream(std::unique_ptr<ByteStream> wire, TlsSession session);

/// One byte stream over several, its strands: what one of them cannot have in flight, the others
/// carry. Both sides give the strands, at least one, in the same order. Each piece of the stream
/// goes by a strand that has room, behind its number, so strands of different speeds are used as
/// they are; the reader takes the pieces by their numbers. A strand that fails ends the stream.
std::unique_ptr<ByteStream> make_bundle_stream(std::vector<std::unique_ptr<ByteStream>> strands);

/// A byte stream between two local ranks, over the rings of a host region: this rank's side of the
/// pair of rings shared with another local rank, of a region that open_region made. Both sides may
/// be opened at any time; an end is final. Opening rings the peer's doorbell and wakes its mailbox.
std::unique_ptr<ByteStream> open_shared_stream(shm::HostRegion& region, int peer_local_rank);
/// Grows with every stream that a peer opens towards this rank: one load tells whether to ask
/// `shared_stream_awaits`.
std::uint32_t shared_stream_doorbell(shm::HostRegion& region);
/// Whether the peer has opened its side (whether or not this rank has).
bool shared_stream_awaits(shm::HostRegion& region, int peer_local_rank);

}  // namespace muster::transport
