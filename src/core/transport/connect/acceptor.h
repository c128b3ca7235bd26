// SPDX-License-Identifier: BSD-3-Clause
/// Listens, accepts, and takes every connection through its handshake: only peers that have proved
/// the job's secret get further.
///
/// Unauthenticated peers cost little. A connection that has not finished its handshake holds its
/// socket and a few hundred bytes (50 KiB from a TLS greeting of the right form on), is closed
/// after five seconds, and makes room for a newer one if there are too many. When the process has
/// no descriptor left, the oldest pending connections are closed first, then one descriptor held in
/// reserve serves, then accepting pauses until there are descriptors again. Refused connections are
/// counted, and logged once a second at most.
#pragma once

#include <functional>
#include <list>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/base/process/fork_guard.h"
#include "core/net/socket_address.h"
#include "core/security/handshake.h"
#include "core/security/refusals.h"
#include "core/security/secret.h"
#include "core/transport/connect/pending_connection.h"
#include "core/transport/factory.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::transport {

struct AcceptorOptions {
  Handshake::Hello hello;
  Way way = Way::tcp;  ///< what the listening sockets are
  std::size_t most_pending = 256;
  Duration handshake_limit = std::chrono::seconds(5);  // limit: of a handshake
  /// Checks a socket before anything is read from it; false closes it. Empty: accepts every socket.
  std::function<bool(int socket)> admit;
  /// Whether a peer is wanted now (`PendingConnection::Welcome`).
  PendingConnection::Welcome welcome = [](const Handshake::Peer&) { return true; };
  /// A peer that has proved the secret.
  std::function<void(AuthenticatedSocket)> arrived;
};

/// Not thread-safe.
class Acceptor {
 public:
  Acceptor(AcceptorOptions options, Secret secret)
      : options_(std::move(options)), secret_(std::move(secret)) {}

  /// Starts to serve a listening socket.
  Status serve(Descriptor listener);
  /// Peers that have proved the secret open so many more connections. Those take no place of
  /// others.
  void expect(std::size_t connections) { expected_ = connections; }
  /// For epoll: readable when `poll` has something to do.
  int descriptor() const { return epoll_.get(); }
  bool poll(TimePoint now);
  TimePoint next_timer() const;
  std::size_t pending() const { return pending_.size(); }
  /// How many connections did not prove the secret, or were another job's. Thread-safe.
  std::uint64_t refusals() const { return refusals_.count(); }

 private:
  using Pending = std::list<PendingConnection>;  // oldest first

  bool accept_from(int listener, TimePoint now);
  bool find_descriptor(TimePoint now);
  void advance(Pending::iterator connection, TimePoint now);
  void drop(Pending::iterator connection);
  void refuse(int socket, const std::string& why, TimePoint now);
  void drop_oldest(const std::string& why, TimePoint now);
  void watch_listeners(bool on);

  AcceptorOptions options_;
  Secret secret_;
  RefusalCount refusals_;
  GuardedDescriptor epoll_;
  GuardedDescriptor reserve_;
  std::vector<GuardedDescriptor> listeners_;
  Pending pending_;
  std::size_t expected_ = 0;
  std::unordered_map<int, Pending::iterator> by_descriptor_;
  bool paused_ = false;
  TimePoint resume_at_{};
  TimePoint quiet_until_{};
};

/// Links listen on the named interfaces; else on the address that routes to the store; else, if the
/// store is a file that other hosts may share, on that of the default route; else on loopback.
/// `others_may_come`: ranks of other hosts can prove that they belong to the job. May ask a
/// resolver, up to the deadline.
Result<std::vector<SocketAddress>> addresses_to_listen_on(const ConnectorOptions& options,
                                                          bool others_may_come, TimePoint deadline);

}  // namespace muster::transport
