/// A port that is kept free until a program of the job listens there.
#pragma once

#include <cstdint>

#include "core/base/descriptor.h"
#include "muster/status.h"

namespace muster::launch {

/// Reserved on all addresses of this host by sockets that are bound but do not listen. The kernel
/// does not hand it out as a free port, but a server that asks for exactly this port with
/// SO_REUSEADDR gets it.
class ReservedPort {
 public:
  static Result<ReservedPort> take();
  std::uint16_t number() const { return number_; }

 private:
  Descriptor four_, six_;  // a host may have no IPv6
  std::uint16_t number_ = 0;
};

}  // namespace muster::launch
