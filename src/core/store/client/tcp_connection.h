// SPDX-License-Identifier: BSD-3-Clause
/// A client's connection to a TCP store: blocking, one request at a time, with deadlines. Within a
/// host it uses the Unix socket beside the server's port; otherwise TCP with encryption
/// (`core/security/tls_session.h`). Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/process/fork_guard.h"
#include "core/net/socket_address.h"
#include "core/security/refusals.h"
#include "core/security/secret.h"
#include "core/security/tls_session.h"
#include "core/store/client/outage_log.h"
#include "core/store/store_protocol.h"

namespace muster::store {

struct TcpEndpoint {
  std::string host;
  std::uint16_t port = 0;
  Secret secret;
  std::string job;
  Handshake::Role role = Handshake::Role::store;
  bool within_host = true;  ///< use the server's Unix socket if it is on this host
  std::int64_t epoch = 0;   ///< 0: none; else each connection begins with Op::enter
  std::string epoch_record{};
  /// "the store at node1:29500".
  std::string name() const;
};

/// Before a warning.
inline constexpr Duration kUnreachableFor = std::chrono::seconds(5);  // limit: a server that starts

class TcpConnection {
 public:
  /// Retries until the deadline while nothing listens there. A refused handshake fails immediately
  /// with the reason; under a secret, a refusal in the clear once `ClearAnswers` tells.
  /// `was_there`: the server is known to have been up, so a closed port means that it has exited
  /// (Code::network). Logs a warning after `patience`; calls with one `outage` log it together.
  static Result<std::unique_ptr<TcpConnection>> open(const TcpEndpoint& endpoint,
                                                     TimePoint deadline, bool was_there,
                                                     Duration patience = kUnreachableFor,
                                                     const Resolver& resolver = ask_resolver,
                                                     OutageLog* outage = nullptr);

  /// Sends the request in one write and waits for the reply: first polls (`look`), then sleeps in
  /// the kernel. After a connection failure (`broken`) the object must be discarded, because the
  /// reply may still arrive.
  Reply exchange(const Request& request, TimePoint deadline);
  /// Sends a request without waiting for its reply, which would be taken for that of a later call.
  /// Use the connection for nothing else afterwards.
  Status post(const Request& request, TimePoint deadline);
  bool broken() const { return broken_; }
  /// Aborts the pending request and all later ones. Thread-safe.
  void shut_down();
  /// True in a forked child, in which the connection is unusable.
  bool forked() const { return mark_.forked(); }

 private:
  enum class EndpointWay : std::uint8_t { unix_socket, tcp };
  explicit TcpConnection(Descriptor socket, std::string name);
  Status shake_hands(const TcpEndpoint& endpoint, EndpointWay way, TimePoint deadline);
  template <class Session>
  Status shake_hands(Session& session, TimePoint deadline);
  Status send_all(std::vector<ConstBytes> pieces, TimePoint deadline);
  Status send_bytes(std::span<ConstBytes> pieces, TimePoint deadline);
  ssize_t look();
  /// Receives the available bytes; waits for the first one.
  Result<ConstBytes> receive(TimePoint deadline);
  Result<ConstBytes> receive_bytes(TimePoint deadline);
  /// Sets how long the next system call may block. False: not at all, since the deadline has
  /// passed. The call is made all the same: what came while this process stood still must count.
  bool arm(int option, Duration& armed, TimePoint deadline);
  Status closed() const;
  Reply fail(Status status);

  GuardedDescriptor socket_;
  ProcessMark mark_;
  std::string name_;
  std::optional<TlsSession> tls_;  // over TCP only
  std::vector<std::byte> buffer_;
  std::vector<std::byte> plain_;  // the most recently decrypted bytes
  RequestFrames frames_;
  std::uint64_t next_id_ = 1;
  Duration receive_limit_{0};
  Duration send_limit_{0};
  int misses_ = 0;    // current backoff of polling, in replies
  int unlooked_ = 0;  // replies still to be received without polling first
  bool broken_ = false;
  bool over_network_ = false;
};

}  // namespace muster::store
