// SPDX-License-Identifier: BSD-3-Clause
/// The store servers of this process that outlive their last user: ranks that are late still learn
/// from them why a meeting failed.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "core/net/socket_address.h"
#include "core/store/server/tcp_server.h"

namespace muster::store {

/// Thread-safe. The process's exit waits, for at most 2 s, until the ranks that have joined are
/// gone. A forked child has none.
class LingeringServers {
 public:
  static LingeringServers& of_process();
  /// For `of_process`.
  LingeringServers();

  void add(std::shared_ptr<TcpServer> server);
  /// Ends those that listen at `address`, or at an address that excludes it: there, another server
  /// is about to listen.
  void make_room(const SocketAddress& address);

 private:
  template <class Which>
  void end(const Which& which);
  void end_all();

  std::mutex mutex_;  // guards the list; nothing is taken under it, and servers end without it
  std::vector<std::shared_ptr<TcpServer>> servers_;
};

}  // namespace muster::store
