// SPDX-License-Identifier: BSD-3-Clause
/// Streams over sockets: listens for peers, connects to them, and settles crossing connections.
///
/// If two ranks connect to each other at the same time, the lower rank's connection wins: the lower
/// rank refuses the other while its own is in progress, and the higher rank waits for it. A second
/// stream from a rank that is linked is turned away too. Greetings carry rank, world size and the
/// nonce that the rank has published, so that a process left over from an earlier run with the same
/// secret is not taken for a rank of this one.
///
/// A link over a long way is a bundle of connections (`strands.h`). Crossings are settled by the
/// first of them. A bundle of which one connection fails is begun anew as a single connection.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/net/socket_address.h"
#include "core/security/handshake.h"
#include "core/security/refusals.h"
#include "core/security/secret.h"
#include "core/transport/connect/acceptor.h"
#include "core/transport/connect/connector.h"
#include "core/transport/connect/pending_connection.h"
#include "core/transport/connect/strands.h"
#include "muster/clock.h"

namespace muster::transport {

/// Not thread-safe.
class SocketStreams {
 public:
  struct LinkPeer {
    std::string name;  ///< for messages
    std::vector<SocketAddress> addresses;
    std::uint64_t nonce = 0;
  };

  /// `hello`: this rank's, with its nonce as the note.
  SocketStreams(Handshake::Hello hello, Secret secret);

  /// Listens on each address (their ports: free ones). `pinned`: connections leave from these
  /// addresses too.
  Status listen(const std::vector<SocketAddress>& addresses, bool pinned);
  /// The addresses that it listens on, with ports.
  const std::vector<SocketAddress>& addresses() const { return addresses_; }

  /// All ranks of the job. `poll` may be called from now on and reports to `events`.
  void settle(std::vector<LinkPeer> book, ConnectorEvents& events);
  void connect(int peer, TimePoint deadline);
  /// The peer has ended: an attempt under way towards it fails with `cause`.
  void give_up(int peer, const Status& cause);
  bool poll(TimePoint now);
  int descriptor() const { return epoll_.get(); }
  TimePoint next_timer() const;
  /// As of Acceptor.
  std::uint64_t refusals() const { return acceptor_.refusals(); }

 private:
  struct Attempt {
    TimePoint deadline;
    TimePoint retry_at{};
    std::size_t tries = 0;
    std::size_t refusals = 0;  // consecutive refused connects
    ClearAnswers clear{};
    bool awaits_peer = false;  // the peer's own connection, or more of its bundle, is on its way
    bool single = false;       // a bundle has failed
    Handshake::Strand strand;  // of `connection`
    std::unique_ptr<PendingConnection> connection;  // the only one, or the first of a bundle
    std::unique_ptr<Bundle> bundle;                 // the first has been accepted
    std::vector<std::unique_ptr<PendingConnection>> others;  // of the bundle, from the second on
    std::size_t index = 0;                                   // of the address
    SocketAddress address;
    Status last;

    bool under_way() const { return connection != nullptr || bundle != nullptr; }
    /// The limit of the bundle or connection that is under way.
    TimePoint limit() const;
    PendingConnection* with(int descriptor) const;
    void drop();
  };
  using Connected = std::function<std::optional<TlsSession>(int socket)>;
  using Attempts = std::map<int, Attempt>;

  bool welcomes(const Handshake::Peer& peer) const;
  void start(int peer, Attempt& attempt, TimePoint now);
  std::unique_ptr<PendingConnection> begin(Attempt& attempt, const Handshake::Strand& strand,
                                           TimePoint now, Connected connected = {});
  Descriptor open_towards(const Attempt& attempt);
  std::optional<TlsSession> first_of_bundle(int peer, int socket);
  std::size_t spare_strands(int peer) const;
  void begin_others(Attempt& attempt, TimePoint now);
  Handshake::Hello hello_as(const Handshake::Strand& strand) const;
  void advance(int peer, PendingConnection& connection, TimePoint now);
  void finish(int peer, PendingConnection& connection, TimePoint now);
  void on_failure(int peer, const PendingConnection& connection, TimePoint now);
  void give_up_bundle(Attempt& attempt, TimePoint now);
  bool end_late_ones(TimePoint now);
  void retry(Attempt& attempt, TimePoint now);
  void fail(int peer, Status cause);
  void arrived(AuthenticatedSocket with);
  void establish(int rank, std::vector<AuthenticatedSocket> sockets);
  const LinkPeer& peer(int rank) const { return book_[static_cast<std::size_t>(rank)]; }

  Handshake::Hello hello_;
  Secret secret_;
  GuardedDescriptor epoll_;
  Acceptor acceptor_;
  std::vector<SocketAddress> addresses_;
  bool pinned_ = false;
  std::vector<LinkPeer> book_;
  std::vector<bool> linked_;
  Attempts attempts_;
  std::map<int, Bundle> bundles_;    // of peers that connect to this rank
  std::uint32_t bundles_begun_ = 0;  // none of this process has the number of another
  std::size_t further_strands_ = 0;  // of the links so far, besides the first of each
  TimePoint now_{};                  // of the latest poll
  ConnectorEvents* events_ = nullptr;
};

}  // namespace muster::transport
