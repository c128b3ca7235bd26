/// A connection of one's own to the server of a TCP store, for requests that `Store` has no method
/// for (`lease_table.h`).
#pragma once

#include "muster/clock.h"
#include "muster/store/request.h"

namespace muster::store {

/// `exchange` and `post` are for one thread, `cut` for any. Its end is seen by the server at once,
/// also when the process is killed.
class ServerConnection {
 public:
  virtual ~ServerConnection() = default;
  /// Sends the request and waits for its reply. After an error of the connection (Code::network,
  /// Code::timed_out, Code::aborted after `cut`) every later exchange fails in the same way.
  virtual Reply exchange(const Request& request, TimePoint deadline) = 0;
  /// Sends a request whose reply nobody waits for; the connection serves nothing else afterwards.
  virtual Status post(const Request& request, TimePoint deadline) = 0;
  /// Ends the connection, and an exchange that waits.
  virtual void cut() = 0;
};

}  // namespace muster::store
