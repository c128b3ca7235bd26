/// The TCP store's server: a thread that feeds a `StoreServer` from sockets.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "muster/base/clock.h"
#include "muster/base/descriptor.h"
#include "muster/base/secret.h"
#include "muster/base/status.h"

namespace muster::store {

struct TcpServerOptions {
  std::string
      host;  ///< a name or address of this host: nothing else is listened on. Empty: all interfaces
  std::uint16_t port = 0;
  Descriptor listener;  ///< a bound TCP socket to serve on instead; `port` is then its port or 0
  Secret secret;
  std::string job;
  TimePoint deadline = TimePoint::max();  ///< for finding the addresses of `host`
};

class TcpServer {
 public:
  static Result<std::shared_ptr<TcpServer>> start(TcpServerOptions options);
  /// Sends what is waiting to be sent, for at most a second, and closes everything.
  virtual ~TcpServer() = default;
  virtual std::uint16_t port() const = 0;
};

}  // namespace muster::store
