/// A client's connection to a TCP store: blocking, one request at a time, with deadlines. Within a
/// host it goes over the Unix socket that the server has beside its port, else over TCP, encrypted
/// (`base/tls_session.h`). One thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/base/fork_guard.h"
#include "muster/base/secret.h"
#include "muster/base/socket_address.h"
#include "muster/base/tls_session.h"
#include "muster/store/store_protocol.h"

namespace muster::store {

struct TcpEndpoint {
  std::string host;
  std::uint16_t port = 0;
  Secret secret;
  std::string job;
  bool within_host = true;  ///< by the server's Unix socket where it is on this host
  /// "the store at node1:29500".
  std::string name() const;
};

class TcpConnection {
 public:
  /// Tries again until the deadline while nobody listens there; a refused handshake ends it at
  /// once, with the reason. `was_there`: the server is known to have been up, so that a port where
  /// nobody listens any more means that it has gone (Code::network). What takes longer than
  /// `patience` is told once, as a warning in the log.
  static Result<std::unique_ptr<TcpConnection>> open(const TcpEndpoint& endpoint,
                                                     TimePoint deadline, bool was_there,
                                                     Duration patience = std::chrono::seconds(5),
                                                     const Resolver& resolver = ask_resolver);

  /// One write of the request, then reads until the reply is there: the first look for a moment
  /// (`look`), then asleep in the kernel. After a failure of the connection itself (`broken`) it
  /// can only be thrown away: the reply may still come.
  Reply exchange(const Request& request, TimePoint deadline);
  /// Sends a request and waits for nothing. Its reply, if one comes, is not for this connection's
  /// other calls: use it for nothing else.
  Status post(const Request& request, TimePoint deadline);
  bool broken() const { return broken_; }
  /// In a forked child: it has no connection any more.
  bool forked() const { return mark_.forked(); }

 private:
  enum class Way : std::uint8_t { unix_socket, tcp };
  explicit TcpConnection(Descriptor socket, std::string name);
  Status shake_hands(const TcpEndpoint& endpoint, Way way, TimePoint deadline);
  template <class Session>
  Status shake_hands(Session& session, TimePoint deadline);
  Status send_all(std::vector<ConstBytes> pieces, TimePoint deadline);
  Status send_bytes(std::span<ConstBytes> pieces, TimePoint deadline);
  ssize_t look();
  /// Receives what there is, waiting for the first byte.
  Result<ConstBytes> receive(TimePoint deadline);
  Result<ConstBytes> receive_bytes(TimePoint deadline);
  /// How long the next call into the kernel may block; false when the deadline has passed.
  bool arm(int option, Duration& armed, TimePoint deadline);
  Status closed() const;
  Reply fail(Status status);

  GuardedDescriptor socket_;
  ProcessMark mark_;
  std::string name_;
  std::optional<TlsSession> tls_;  // over TCP
  std::vector<std::byte> buffer_;
  std::vector<std::byte> plain_;  // what was decrypted last
  FrameReader frames_;
  std::uint64_t next_id_ = 1;
  Duration receive_limit_{0};
  Duration send_limit_{0};
  int misses_ = 0;    // in a row, of `look`
  int unlooked_ = 0;  // answers that are still slept for at once
  bool broken_ = false;
};

}  // namespace muster::store
