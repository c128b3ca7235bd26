/// Passes memory files to the other ranks of this host over an abstract Unix socket. Private to
/// `transport/`.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "core/base/process/fork_guard.h"
#include "core/transport/connect/acceptor.h"

namespace muster::transport {

class LocalServer {
 public:
  ~LocalServer();

  /// Listens under `name`. Only processes of the same user that prove the secret are answered.
  Status listen(const std::string& name, const Handshake::Hello& hello, const Secret& secret);
  bool listens() const { return acceptor_ != nullptr; }

  /// Sets the file returned for requests of the region; without one the answer says that there is
  /// none.
  void set_region(GuardedDescriptor file) { region_file_ = std::move(file); }
  /// Answers on a thread of its own while the ranks meet, because nothing polls yet.
  Status start_thread();
  void stop_thread();

  /// For epoll: readable when `poll` has something to do.
  int descriptor() const { return acceptor_->descriptor(); }
  bool poll(TimePoint now) { return acceptor_->poll(now); }
  TimePoint next_timer() const { return acceptor_->next_timer(); }
  /// As of Acceptor.
  std::uint64_t refusals() const { return acceptor_ ? acceptor_->refusals() : 0; }

 private:
  void answer(const AuthenticatedSocket& asks) const;
  void serve();

  std::unique_ptr<Acceptor> acceptor_;
  GuardedDescriptor region_file_;
  std::thread thread_;
  GuardedDescriptor stop_;
  ProcessMark mark_;
};

}  // namespace muster::transport
