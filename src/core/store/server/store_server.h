// SPDX-License-Identifier: BSD-3-Clause
/// The TCP store's server without sockets: bytes and the time go in, bytes and requested actions
/// come out. `tcp_server.cc` drives it with Asio; tests, fuzzers and a simulator drive it from
/// memory. Not thread-safe.
///
/// Guarantees:
/// * No request is parsed before the client has proved the secret, within `greeting_limit`: over
///   TCP by TLS (`core/security/tls_session.h`), over a Unix socket by the plain handshake. At most
///   `max_unauthenticated` clients may be unauthenticated; the oldest is dropped first.
/// * The server stops reading from a connection that has `max_output` bytes of replies waiting.
///   Other connections are not affected.
/// * Only received bytes are held. A frame with a false length ends the connection.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/security/handshake.h"
#include "core/security/refusals.h"
#include "core/security/tls_session.h"
#include "core/store/observer_rights.h"
#include "core/store/server/store_table.h"
#include "core/store/store_protocol.h"

namespace muster::store {

class StoreServer {
 public:
  using Connection = std::uint64_t;
  struct StoreServerOptions {
    Secret secret;
    std::string job = {};           ///< of clients and launchers
    std::string observed_job = {};  ///< of observers
    Duration greeting_limit = std::chrono::seconds(5);
    std::size_t max_unauthenticated = 256;
    std::size_t max_output = std::size_t{8} << 20;  // limit: memory
    std::size_t max_parked = 1024;                  ///< blocked requests per connection
  };
  explicit StoreServer(StoreServerOptions options);
  ~StoreServer();

  // Events.
  /// The transport of a connection. The peer of a Unix socket is a process of this user on this
  /// host, so the data need not be encrypted.
  enum class ListenerWay : std::uint8_t { unix_socket, tcp_same_host, tcp };
  /// `peer` is for messages. Connection numbers are never reused.
  void on_open(Connection connection, const std::string& peer, ListenerWay way, TimePoint now);
  void on_bytes(Connection connection, ConstBytes bytes, TimePoint now);
  /// The connection has ended for any reason.
  void on_closed(Connection connection, TimePoint now);
  /// A connection was refused before `on_open`: `why` says which and why.
  void on_refused(const std::string& why, TimePoint now) { refuse(why, now); }
  /// `count` bytes of its output have been written.
  void on_written(Connection connection, std::size_t count, TimePoint now);
  /// Call at `next_timer()` or later.
  void on_time(TimePoint now);

  // Requested actions.
  /// Connections whose output, wants_read or wants_close has changed since the last call.
  std::vector<Connection> take_changed();
  /// The first pieces of pending output, at most `most`. Valid until the next call of any `on_`
  /// function.
  std::vector<ConstBytes> output(Connection connection, std::size_t most) const;
  bool wants_read(Connection connection) const;
  /// Close it once as much of its output as fits has been written. A refusal fits; an
  /// unauthenticated client that does not read loses it.
  bool wants_close(Connection connection) const;
  TimePoint next_timer() const;

  /// As `StoreTable` says.
  bool has_ranks() const { return table_.has_ranks(); }
  bool has_news_for_late_ranks() const { return table_.has_news_for_late_ranks(); }

  std::size_t connections() const { return clients_.size(); }
  /// Unauthenticated network connections.
  std::size_t unauthenticated() const;
  /// Bytes of unparsed input held for a connection.
  std::size_t held(Connection connection) const;

 private:
  struct Client;
  using Ticket = StoreTable::Ticket;
  struct Asker {
    Connection connection = 0;
    std::uint64_t id = 0;
  };

  void refuse(const std::string& sentence, TimePoint now);
  /// Closes a connection that has proved the secret. Logged once a second at most.
  void drop(Client& client, const std::string& why, TimePoint now);
  void refuse_surplus_observer(Client& client);
  void greet(Client& client, ConstBytes& bytes, TimePoint now);
  bool decrypt(Client& client, TimePoint now);
  void encrypt(Client& client);
  void serve(Client& client, TimePoint now);
  bool is_of_the_past(const Client& client) const;
  void refuse_the_past(TimePoint now);
  void answer(StoreTable::Answers& answers);
  void send(Client& client, std::uint64_t id, Reply reply);
  void close(Client& client);
  void forget_unauthenticated(Client& client);
  bool choked(const Client& client) const;
  /// Resumes requests that were deferred while their connection had too much output.
  void resume(TimePoint now);

  const StoreServerOptions options_;
  StoreTable table_;
  ObserverRights rights_;
  std::size_t observers_ = 0;  // connections that have proved the observer's key
  RefusalCount refusals_, dropped_;
  std::unordered_map<Connection, Client> clients_;
  // A client is in it as long as it is greeting. Oldest first; all have the same time limit.
  std::list<std::pair<TimePoint, Connection>> unauthenticated_;
  // A ticket is here, and among its client's parked ones, until it is answered or the client is
  // gone.
  std::unordered_map<Ticket, Asker> askers_;
  Ticket next_ticket_ = 1;
  std::set<Connection> changed_;
  std::set<Connection> resumable_;
};

}  // namespace muster::store
