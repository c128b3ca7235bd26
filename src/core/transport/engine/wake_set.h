/// A connector's descriptors in one epoll set, with one of its own for work that needs no other.
/// Private to `transport/`.
#pragma once

#include "core/base/process/fork_guard.h"
#include "muster/status.h"

namespace muster::transport {

class WakeSet {
 public:
  Status open();
  Status watch(int descriptor);
  /// For epoll: readable while any of them is ready.
  int descriptor() const { return epoll_.get(); }
  bool any_ready() const;
  /// Makes the set ready until `drain`.
  void nudge();
  /// True where it was nudged.
  bool drain();

 private:
  GuardedDescriptor epoll_;
  GuardedDescriptor nudge_;  // an eventfd
};

}  // namespace muster::transport
