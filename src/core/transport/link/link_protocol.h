/// The message protocol of one link as a state machine: bytes in, bytes out. Private to
/// `transport/`.
#pragma once

#include "core/transport/link/frame_reader.h"
#include "core/transport/link/frame_writer.h"

namespace muster::transport {

struct LinkProtocol {
  explicit LinkProtocol(LinkEvents& events) : in(events), out(events) {}

  FrameReader in;
  FrameWriter out;
};

}  // namespace muster::transport
