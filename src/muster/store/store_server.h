/// The TCP store's server without its sockets: bytes and the time come in, bytes and wishes go out.
/// `tcp_server.cc` feeds it from Asio; tests, fuzzers and a simulator feed it from memory. One
/// thread at a time.
///
/// What it promises whoever connects:
///  - no request is parsed before the secret is proved, within `greeting_limit`: over TCP by TLS
///  (`base/tls_session.h`), over a Unix socket by the plain handshake; at most `max_strangers` may
///  be at it, the oldest goes first;
///  - a connection that does not take its replies is not read from any more once `max_output` of
///  them wait; it holds up nobody else;
///  - only bytes that have come are held: a length that lies ends the connection.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "muster/base/handshake.h"
#include "muster/base/tls_session.h"
#include "muster/store/store_protocol.h"
#include "muster/store/store_table.h"

namespace muster::store {

class StoreServer {
 public:
  using Connection = std::uint64_t;
  struct Options {
    Secret secret;
    std::string job;
    Duration greeting_limit = std::chrono::seconds(5);
    std::size_t max_strangers = 256;
    std::size_t max_output = std::size_t{8} << 20;  // limit: memory
    std::size_t max_parked = 1024;  ///< requests of one connection that wait at the same time
  };
  explicit StoreServer(Options options);
  ~StoreServer();

  // What happened.
  /// How a connection has come. A Unix socket's other end is this user's process on this host, so
  /// what crosses it need not be encrypted.
  enum class Way : std::uint8_t { unix_socket, tcp_same_host, tcp };
  /// `peer` is for messages. Numbers are never used twice.
  void on_open(Connection connection, const std::string& peer, Way way, TimePoint now);
  void on_bytes(Connection connection, ConstBytes bytes, TimePoint now);
  /// The connection is gone for whatever reason.
  void on_closed(Connection connection, TimePoint now);
  /// `count` bytes of its pieces are on their way.
  void on_written(Connection connection, std::size_t count, TimePoint now);
  /// To be called at `next_timer()` or later.
  void on_time(TimePoint now);

  // What is to be done about it.
  /// Connections for which something has changed since the last call: output, the wish to read, or
  /// the wish to close.
  std::vector<Connection> take_changed();
  /// The first pieces of waiting output, at most `most`. Valid until the next call of any `on_`.
  std::vector<ConstBytes> output(Connection connection, std::size_t most) const;
  bool wants_read(Connection connection) const;
  /// To be closed as soon as what fits of its output is written (a refusal fits; a stranger that
  /// does not read it loses it).
  bool wants_close(Connection connection) const;
  TimePoint next_timer() const;

  std::size_t connections() const { return clients_.size(); }
  /// From the network, whose secret is not proved yet.
  std::size_t strangers() const;
  /// Bytes held for a connection: input not parsed yet.
  std::size_t held(Connection connection) const;

 private:
  struct Client;
  using Ticket = StoreTable::Ticket;
  struct Asker {
    Connection connection = 0;
    std::uint64_t id = 0;
  };

  void greet(Client& client, ConstBytes& bytes);
  bool decrypt(Client& client);
  void encrypt(Client& client);
  void serve(Client& client, TimePoint now);
  void answer(StoreTable::Answers& answers);
  void send(Client& client, std::uint64_t id, Reply reply);
  void close(Client& client);
  void forget_stranger(Client& client);
  bool choked(const Client& client) const;
  /// Goes on with requests that were left lying while their connection was choked.
  void resume(TimePoint now);

  const Options options_;
  StoreTable table_;
  std::unordered_map<Connection, Client> clients_;
  std::list<std::pair<TimePoint, Connection>> strangers_;  // oldest first: all have the same limit
  std::unordered_map<Ticket, Asker> askers_;
  Ticket next_ticket_ = 1;
  std::set<Connection> changed_;
  std::set<Connection> resumable_;
};

}  // namespace muster::store
