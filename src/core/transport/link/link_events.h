/// A link's input events. Private to `transport/`.
#pragma once

#include <memory>

#include "core/base/bytes.h"
#include "core/transport/link/frame.h"
#include "muster/status.h"

namespace muster::transport {

/// A link's input events. A failure returned from here is a fault of the peer and ends the link.
/// The functions must not use the link's input.
class LinkEvents {
 public:
  virtual ~LinkEvents() = default;
  /// A checked header of kind eager or data with a payload. Returns where the payload goes; bytes
  /// that do not fit are read and dropped.
  virtual Result<MutableBytes> on_payload(const FrameHeader& header) = 0;
  /// A whole frame; for eager and data the payload is where `on_payload` wanted it, else it is
  /// `record`.
  virtual Status on_frame(const FrameHeader& header, ConstBytes record) = 0;
  /// A frame with an owner has been handed to the stream, or its last fragment has. The owner's
  /// buffer is not used any more.
  virtual void on_sent(const std::shared_ptr<void>& owner) = 0;
};

}  // namespace muster::transport
