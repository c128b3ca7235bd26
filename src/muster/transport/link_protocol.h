/// The message protocol of one link as a state machine: bytes in, bytes out. Private to
/// `transport/`.
#pragma once

#include "muster/transport/frame_reader.h"
#include "muster/transport/frame_writer.h"

namespace muster::transport {

struct LinkProtocol {
  explicit LinkProtocol(LinkEvents& events) : in(events), out(events) {}

  FrameReader in;
  FrameWriter out;
};

}  // namespace muster::transport
