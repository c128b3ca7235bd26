/// One side of an established, authenticated, ordered and reliable connection to one peer. Private
/// to `transport/` and to the simulator: everything above speaks messages (`channel.h`).
#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "muster/base/bytes.h"
#include "muster/status.h"

namespace muster::transport {

class ByteStream {
 public:
  virtual ~ByteStream() = default;

  /// Takes what fits now from the pieces in order and says how many bytes; 0 when nothing fits.
  /// Never blocks. A failure is final.
  virtual Result<std::size_t> write(std::span<const ConstBytes> pieces) = 0;
  /// Fills the pieces in order with what is there and says how many bytes; 0 when nothing is. Never
  /// blocks. Code::closed at the end of the stream, once all bytes before it were read; a failure
  /// is final.
  virtual Result<std::size_t> read(std::span<const MutableBytes> pieces) = 0;

  /// What has come and can be looked at where it is, in order; it stays there until it is read or
  /// dropped. Nothing, where a stream keeps what comes elsewhere.
  virtual std::array<ConstBytes, 2> look() { return {}; }
  /// Done with the first `bytes` of what `look` has just named.
  virtual void drop([[maybe_unused]] std::size_t bytes) {}

  /// Whether something that `write` took has still to be sent, by the next `write`, of nothing if
  /// need be, once the descriptor takes more.
  virtual bool has_unsent() const { return false; }
  /// Whether `read` has something to give, or to say, of which the descriptor does not tell.
  virtual bool holds_more() const { return false; }

  /// For epoll: readable when `read` may get on. -1 where the owner's mailbox is woken instead.
  virtual int descriptor() const = 0;
  /// "tcp" (encrypted), "shm", "loopback", "sim".
  virtual const char* kind() const = 0;
};

}  // namespace muster::transport
