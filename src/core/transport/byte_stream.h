/// One side of an established, authenticated, ordered and reliable connection to one peer. Private
/// to `transport/` and to the simulator: everything above speaks messages (`channel.h`).
#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "core/base/bytes.h"
#include "muster/status.h"

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
  /// Whether `read` has bytes, or an end to report, although the descriptor is not readable.
  virtual bool holds_more() const { return false; }

  /// For epoll: readable when `read` may make progress. -1 if the owner's mailbox is woken instead.
  virtual int descriptor() const = 0;
  /// "tcp" (encrypted), "shm", "loopback", "sim".
  virtual const char* kind() const = 0;
};

}  // namespace muster::transport
