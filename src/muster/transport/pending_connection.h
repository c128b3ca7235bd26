/// One socket on its way through the handshake, from either side. Never reads a byte beyond it:
/// what follows belongs to the stream.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "muster/base/clock.h"
#include "muster/base/fork_guard.h"
#include "muster/base/handshake.h"

namespace muster::transport {

class PendingConnection {
 public:
  enum class Progress { waiting, done, failed };
  /// Whether a peer is wanted now; asked after its greeting, before its proof: what it says of
  /// itself is not proved yet.
  using Welcome = std::function<bool(const Handshake::Peer&)>;

  /// `connecting`: the socket's connect is still under way.
  PendingConnection(GuardedDescriptor socket, Handshake::Side side, const Handshake::Hello& hello,
                    const Secret& secret, bool connecting, TimePoint since, TimePoint limit);

  /// Goes on as far as it can without waiting. Takes account of `welcome` on the acceptor's side.
  Progress advance(const Welcome& welcome);
  /// Once failed: a refusal (Code::refused), or what became of the socket (Code::network,
  /// Code::closed).
  const Status& failure() const { return failure_; }
  const Handshake& handshake() const { return handshake_; }
  /// The other side wants no second connection with us: a crossing was lost.
  bool lost_crossing() const {
    return handshake_.failed() && handshake_.verdict() == Handshake::Verdict::unwelcome;
  }
  /// The connect itself was answered by "nobody listens here".
  bool nobody_there() const { return nobody_there_; }

  int descriptor() const { return socket_.get(); }
  std::uint32_t epoll_events() const;
  GuardedDescriptor take_socket() { return std::move(socket_); }
  TimePoint since() const { return since_; }
  TimePoint limit() const { return limit_; }

 private:
  bool finish_connect();
  bool flush();
  /// 0 where nothing more is there now; -1 where the socket failed or ended.
  int receive_some(const Welcome& welcome);
  Progress fail(Status status);

  GuardedDescriptor socket_;
  Handshake handshake_;
  Handshake::Side side_;
  bool connecting_;
  bool nobody_there_ = false;
  TimePoint since_;
  TimePoint limit_;
  std::string outbox_;
  std::size_t received_ = 0;
  Status failure_;
};

}  // namespace muster::transport
