/// Listens, accepts, and sees every newcomer through its handshake: nobody gets further who has not
/// proved the job's secret.
///
/// Strangers cost little: a connection that has not finished its handshake holds no more than its
/// socket and a few hundred bytes, is closed after five seconds, and makes room for a newer one
/// where there are too many. When the process has no descriptor left, the oldest newcomers go
/// first, then one held in reserve serves, then accepting pauses until there are descriptors again.
#pragma once

#include <functional>
#include <list>
#include <string>
#include <unordered_map>
#include <vector>

#include "muster/base/clock.h"
#include "muster/base/fork_guard.h"
#include "muster/base/handshake.h"
#include "muster/base/secret.h"
#include "muster/base/status.h"
#include "muster/transport/pending_connection.h"

namespace muster::transport {

struct ReceptionOptions {
  Handshake::Hello hello;
  std::size_t most_newcomers = 256;
  Duration handshake_limit = std::chrono::seconds(5);
  /// Looks at a socket before anything is read from it; false closes it. Empty: everybody may try.
  std::function<bool(int socket)> admit;
  /// Whether a peer is wanted now (`PendingConnection::Welcome`).
  PendingConnection::Welcome welcome = [](const Handshake::Peer&) { return true; };
  /// A peer that has proved the secret.
  std::function<void(GuardedDescriptor socket, const Handshake::Peer& peer)> arrived;
};

/// Not thread-safe.
class Reception {
 public:
  Reception(ReceptionOptions options, Secret secret)
      : options_(std::move(options)), secret_(std::move(secret)) {}

  /// Starts to serve a listening socket.
  Status serve(Descriptor listener);
  /// For epoll: readable when `poll` has something to do.
  int descriptor() const { return epoll_.get(); }
  bool poll(TimePoint now);
  TimePoint next_timer() const;
  std::size_t newcomers() const { return newcomers_.size(); }

 private:
  using Newcomers = std::list<PendingConnection>;  // oldest first

  bool accept_from(int listener, TimePoint now);
  bool find_descriptor(TimePoint now);
  void advance(Newcomers::iterator newcomer);
  void drop(Newcomers::iterator newcomer);
  void watch_listeners(bool on);

  ReceptionOptions options_;
  Secret secret_;
  GuardedDescriptor epoll_;
  GuardedDescriptor reserve_;
  std::vector<GuardedDescriptor> listeners_;
  Newcomers newcomers_;
  std::unordered_map<int, Newcomers::iterator> by_descriptor_;
  bool paused_ = false;
  TimePoint resume_at_{};
  TimePoint quiet_until_{};
};

}  // namespace muster::transport
