// SPDX-License-Identifier: BSD-3-Clause
/// The TCP store's server: a thread that feeds a `StoreServer` from sockets.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/descriptor.h"
#include "core/net/socket_address.h"
#include "core/security/secret.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::store {

struct TcpServerOptions {
  /// A name or address of this host; listens on nothing else. Empty: all interfaces.
  std::string host;
  std::vector<std::string> also_at;  ///< as in TcpStoreOptions
  std::uint16_t port = 0;
  /// A bound TCP socket to serve on instead; `port` must then be its port or 0.
  Descriptor listener;
  Secret secret;
  std::string job;
  TimePoint deadline = TimePoint::max();  ///< for resolving `host`
};

class TcpServer {
 public:
  static Result<std::shared_ptr<TcpServer>> start(TcpServerOptions options);
  /// Sends pending output for at most 1 s, then closes everything.
  virtual ~TcpServer() = default;
  virtual std::uint16_t port() const = 0;
  /// Whether no other socket of this host can listen at `address` while the server does.
  virtual bool excludes(const SocketAddress& address) const = 0;

  /// Keeps the server until the ranks that have joined are gone, and those who are late have been
  /// told why a meeting failed, for at most 30 s; or until this process starts another server at
  /// its address (`lingering_servers.h`).
  static void linger(std::shared_ptr<TcpServer> server);
  virtual bool lingers() const = 0;
  /// Whether a lingering server has closed everything.
  virtual bool has_ended() const = 0;
  /// Whether ranks that are connected still need a lingering server.
  virtual bool has_ranks() const = 0;

 protected:
  virtual void begin_to_linger() = 0;
};

}  // namespace muster::store
