// SPDX-License-Identifier: BSD-3-Clause
/// One socket on its way to being a peer's, from either side: over TCP through a TLS handshake,
/// over a Unix socket through the mutual proof of the job's secret.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <variant>

#include "core/base/process/fork_guard.h"
#include "core/security/handshake.h"
#include "core/security/tls_session.h"
#include "muster/clock.h"

namespace muster::transport {

enum class Way : std::uint8_t { unix_socket, tcp };

/// A socket whose other side has proved the job's secret.
struct AuthenticatedSocket {
  GuardedDescriptor socket;
  std::optional<TlsSession> tls;  ///< over TCP: done, and may hold what followed the handshake
  Handshake::Peer peer;
};

class PendingConnection {
 public:
  enum class HandshakeProgress { waiting, done, failed };
  /// Whether a peer is wanted now; asked after its greeting, before its proof: what it says of
  /// itself is not proved yet.
  using Welcome = std::function<bool(const Handshake::Peer&)>;

  struct ConnectionOptions {
    Handshake::Side side = Handshake::Side::connector;
    Way way = Way::tcp;
    bool connecting = false;  ///< the socket's connect is still under way
    TimePoint since{};
    TimePoint limit = TimePoint::max();
    /// Connector, over TCP: asked once the socket is connected; a session that it gives speaks
    /// instead of the one made before.
    std::function<std::optional<TlsSession>(int socket)> connected = {};
  };
  PendingConnection(GuardedDescriptor socket, const Handshake::Hello& hello, const Secret& secret,
                    const ConnectionOptions& options);

  /// Goes on as far as it can without waiting. Takes account of `welcome` on the acceptor's side.
  /// Over a Unix socket no byte beyond the handshake is read.
  HandshakeProgress advance(const Welcome& welcome);
  /// Once failed: a refusal (Code::refused), or what became of the socket (Code::network,
  /// Code::closed).
  const Status& failure() const { return failure_; }
  const Handshake::Peer& peer() const;
  /// Why the handshake failed; `accepted` while it has not.
  Handshake::Verdict verdict() const;
  /// The failure is an answer that nobody has authenticated (`refusals.h`).
  bool failed_in_the_clear() const {
    const auto* tls = std::get_if<TlsSession>(&talk_);
    return tls != nullptr && tls->failed_in_the_clear();
  }
  /// The other side wants no second connection with us: a crossing was lost.
  bool lost_crossing() const { return verdict() == Handshake::Verdict::unwelcome; }
  /// Connector: all is said, and the other side may have accepted already.
  bool may_be_accepted() const {
    const auto* tls = std::get_if<TlsSession>(&talk_);
    return tls != nullptr && tls->awaits_verdict();
  }
  /// The connect itself was refused: no socket listens at the address.
  bool connect_refused() const { return connect_refused_; }

  int descriptor() const { return socket_.get(); }
  std::uint32_t epoll_events() const;
  /// Once done; nothing is left here then.
  AuthenticatedSocket take();
  TimePoint since() const { return options_.since; }
  TimePoint limit() const { return options_.limit; }

 private:
  using Talk = std::variant<Handshake, TlsSession>;

  bool done() const;
  bool failed() const;
  std::size_t wanted() const;
  bool finish_connect();
  bool flush();
  /// 0 where nothing more is there now; -1 where the socket failed or ended.
  int receive_some(const Welcome& welcome);
  void drain() const;
  HandshakeProgress fail(Status status);

  GuardedDescriptor socket_;
  Talk talk_;
  ConnectionOptions options_;
  bool connect_refused_ = false;
  std::string outbox_;
  std::size_t received_ = 0;
  Status failure_;
};

}  // namespace muster::transport
