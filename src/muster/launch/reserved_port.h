/// A port that is kept free until a program of the job listens there.
#pragma once

#include <cstdint>

#include "muster/base/descriptor.h"
#include "muster/status.h"

namespace muster::launch {

/// Of all addresses of this host. Sockets that are bound and do not listen hold it: the system
/// gives it to nobody who asks for any port, but to a server that asks for this one (with
/// SO_REUSEADDR, as servers do).
class ReservedPort {
 public:
  static Result<ReservedPort> take();
  std::uint16_t number() const { return number_; }

 private:
  Descriptor four_, six_;  // a host may have no IPv6
  std::uint16_t number_ = 0;
};

}  // namespace muster::launch
