// SPDX-License-Identifier: BSD-3-Clause
/// How processes of one host pass memory files to each other: over abstract Unix sockets, whose
/// other side's user is checked and proves the secret.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/process/fork_guard.h"
#include "core/net/unix_socket.h"
#include "core/security/handshake.h"
#include "core/security/secret.h"
#include "core/shm/shared_mapping.h"
#include "core/transport/connect/acceptor.h"
#include "core/transport/peer_address.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::transport {

/// The memory files that a rank may ask for: the note in the greeting.
enum class Want : std::uint64_t { region = 1, arena = 2 };

/// Answers a request on a socket whose peer has proved the secret; -1 says that there is no such
/// thing here.
void answer_with(int socket, int passed);
/// Connects, proves the secret, asks, receives. `hello.note` is set to `want`. Code::unsupported
/// where the other side has no such thing.
Result<Descriptor> fetch_locally(const std::string& name, Want want, Handshake::Hello hello,
                                 const Secret& secret, TimePoint deadline);

/// Passes memory files to the other ranks of this host over an abstract Unix socket.
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

  // Used by the thread from `start_thread` to `stop_thread`, otherwise by the caller: never by
  // both, so there is no lock.
  std::unique_ptr<Acceptor> acceptor_;
  GuardedDescriptor region_file_;
  std::thread thread_;
  GuardedDescriptor stop_;
  ProcessMark mark_;
};

/// The arenas of this host's ranks as this process sees them: each is fetched over its owner's Unix
/// socket and mapped on first use.
class LocalArenas : public std::enable_shared_from_this<LocalArenas> {
 public:
  /// `ranks` and `contacts`: of the ranks that share the region, in its order.
  LocalArenas(int local_rank, std::vector<int> ranks, const std::vector<PeerAddress>& contacts,
              Handshake::Hello hello, Secret secret);

  /// `HostRegion::arena_at`. Thread-safe; a load and an addition once mapped. The first call for a
  /// rank takes a round trip to it, up to five seconds.
  std::byte* at(int local_rank, std::uint64_t offset, std::size_t bytes);
  /// `HostRegion::arena_ready`. The first call for a rank fetches its arena on a thread of its own,
  /// which calls `done` at its end.
  bool ready(int local_rank, std::function<void()> done);

 private:
  enum class Fetch { idle, running, over };
  struct ArenaPeer {
    int rank = -1;
    std::string local_name;
    bool is_this_process = false;
    std::mutex installing;  // guards `mapping`; not held during a fetch
    std::atomic<Fetch> ahead{
        Fetch::idle};  // a fetch that `ready` began; over: `at` has its outcome
    // Set once, to `mapping`, with release order; readers need no lock.
    std::atomic<shm::SharedMapping*> mapped{nullptr};
    std::shared_ptr<shm::SharedMapping> mapping;
  };
  shm::SharedMapping* fetch(ArenaPeer& peer);

  Handshake::Hello hello_;
  Secret secret_;
  std::vector<std::unique_ptr<ArenaPeer>> peers_;
};

}  // namespace muster::transport
