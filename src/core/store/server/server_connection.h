/// A dedicated connection to the server of a TCP store, for requests for which `Store` has no
/// method (`lease_table.h`).
#pragma once

#include "core/store/request.h"
#include "muster/clock.h"

namespace muster::store {

/// `exchange` and `post` must be called from one thread; `cut` is thread-safe. The server notices
/// at once when the connection ends, also if the process is killed.
class ServerConnection {
 public:
  virtual ~ServerConnection() = default;
  /// Sends the request and waits for its reply. After an error of the connection (Code::network,
  /// Code::timed_out, Code::aborted after `cut`) every later exchange fails in the same way.
  virtual Reply exchange(const Request& request, TimePoint deadline) = 0;
  /// Sends a request without waiting for its reply. The connection must not be used for anything
  /// else afterwards.
  virtual Status post(const Request& request, TimePoint deadline) = 0;
  /// Ends the connection and any exchange in progress.
  virtual void cut() = 0;
};

}  // namespace muster::store
