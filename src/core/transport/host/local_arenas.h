/// The arenas of this host's ranks as this process sees them: each is fetched over its owner's Unix
/// socket and mapped on first use.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/security/handshake.h"
#include "core/security/secret.h"
#include "core/shm/shared_mapping.h"
#include "core/transport/peer_address.h"

namespace muster::transport {

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
    std::mutex installing;
    std::atomic<Fetch> ahead{
        Fetch::idle};  // a fetch that `ready` began; over: `at` has its outcome
    std::atomic<shm::SharedMapping*> mapped{nullptr};
    std::shared_ptr<shm::SharedMapping> mapping;
  };
  shm::SharedMapping* fetch(ArenaPeer& peer);

  Handshake::Hello hello_;
  Secret secret_;
  std::vector<std::unique_ptr<ArenaPeer>> peers_;
};

}  // namespace muster::transport
