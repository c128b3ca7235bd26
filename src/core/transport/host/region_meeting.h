/// How the ranks of a host find out whether they share memory: the lowest candidate makes a region,
/// the others fetch its file over the Unix socket and map it. Private to `transport/`.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "core/transport/factory.h"
#include "core/transport/host/local_server.h"
#include "core/transport/host/region_peers.h"
#include "core/transport/peer_book.h"

namespace muster::transport {

class RegionMeeting {
 public:
  /// All of these must outlive this.
  RegionMeeting(const ConnectorOptions& options, const Secret& secret, const PeerBook& book)
      : options_(options), secret_(secret), book_(book) {}

  /// `hello`: of this rank, whose note is its nonce.
  Status listen(const std::string& name, Handshake::Hello hello);
  /// This rank's verdict: which region it has mapped. Blocks, up to the deadline.
  Result<MeetingVerdict> meet(TimePoint deadline);
  /// Given all ranks' verdicts; null if nothing is shared.
  Result<std::unique_ptr<RegionPeers>> settle(const std::vector<MeetingVerdict>& verdicts);

  /// Answers requests for arenas from then on.
  LocalServer& server() { return server_; }
  const LocalServer& server() const { return server_; }

 private:
  shm::RegionShape shape_for(std::vector<int> ranks, int maker) const;
  Status make(const std::vector<int>& ranks);
  Status fetch(const std::vector<int>& ranks, TimePoint deadline);

  const ConnectorOptions& options_;
  const Secret& secret_;
  const PeerBook& book_;
  Handshake::Hello hello_;
  LocalServer server_;
  std::shared_ptr<shm::SharedMapping> mapping_;
  std::size_t candidates_ = 0;
};

}  // namespace muster::transport
