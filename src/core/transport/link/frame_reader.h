/// Cuts the incoming bytes of one link into frames: bytes in, events out; no I/O, no clock, no
/// locks. Private to `transport/`.
///
/// `input` says where the next bytes go: small frames through a staging buffer, payloads straight
/// to where the events put them. All input is checked before it is used.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "core/base/bytes.h"
#include "core/transport/link/frame.h"
#include "core/transport/link/link_events.h"
#include "muster/status.h"

namespace muster::transport {

class FrameReader {
 public:
  explicit FrameReader(LinkEvents& events);

  /// Where to read to, in order; the number of pieces. Valid until the next call of anything else
  /// here. `headers_alone`: reads only the header of a frame that has not begun, so that its
  /// payload is read directly to its destination; takes more calls.
  std::size_t input(std::array<MutableBytes, 2>& pieces, bool headers_alone = false);
  /// `bytes` have been read into the pieces that `input` named. A failure is final: the peer does
  /// not keep the protocol.
  Status received(std::size_t bytes);
  /// Whether the next byte that comes is the first of a frame.
  bool between_frames() const { return payload_left_ == 0 && staged_end_ == 0 && !broken_; }
  /// Drops the rest of the payload being read, if any.
  void drain_payload() { sink_ = {}; }

 private:
  Status parse();
  Status start_frame();
  Status finish_frame();
  std::size_t place(ConstBytes bytes);

  LinkEvents& events_;

  // Either a payload is under way (payload_left_ > 0) and goes to sink_, then to nowhere; or a
  // header is being gathered in staging_.
  static constexpr std::size_t kStagingBytes = kEagerBytes + 8 * sizeof(FrameHeader);
  std::unique_ptr<std::byte[]> staging_;
  std::size_t staged_begin_ = 0;
  std::size_t staged_end_ = 0;
  FrameHeader header_;
  std::size_t payload_left_ = 0;
  MutableBytes sink_;
  std::string record_;
  bool broken_ = false;
};

}  // namespace muster::transport
