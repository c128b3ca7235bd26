// SPDX-License-Identifier: BSD-3-Clause
/// The ranks of a host that share memory: how they find out that they do, and what each then has of
/// the others. Private to `transport/`.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/shm/region_memory.h"
#include "core/shm/shared_mapping.h"
#include "core/transport/connect/connector.h"
#include "core/transport/factory.h"
#include "core/transport/host/local_files.h"
#include "core/transport/peer_address.h"

namespace muster::transport {

/// The ranks of this host that share its region, after they have met: streams to them through
/// shared memory, and what they say of themselves.
class RegionPeers {
 public:
  /// `places`: of every rank in the region, or -1. `book` must outlive this.
  static Result<std::unique_ptr<RegionPeers>> open(std::shared_ptr<shm::SharedMapping> mapping,
                                                   const shm::RegionShape& shape,
                                                   const PeerBook& book, std::vector<int> places,
                                                   std::shared_ptr<LocalArenas> arenas);

  shm::HostRegion& region() const { return *region_; }
  int place_of(int rank) const { return places_[static_cast<std::size_t>(rank)]; }

  /// The next poll links the rank at this place.
  void ask_for(int place) { asked_.push_back(place); }
  bool has_asked() const { return !asked_.empty(); }
  /// Reports new streams to `events`: loads only, as long as there is no news.
  bool poll(ConnectorEvents& events);
  /// Calls `left(rank)` for each rank but this one that says that it has left.
  void look_for_leavers(const std::function<void(int rank)>& left);

 private:
  RegionPeers(const PeerBook& book, std::vector<int> places)
      : book_(book), places_(std::move(places)) {}
  void link(int place, ConnectorEvents& events);

  const PeerBook& book_;
  const std::vector<int> places_;
  std::unique_ptr<shm::HostRegion> region_;
  std::vector<bool> linked_;  // by place
  std::vector<int> asked_;    // places
  std::uint32_t doorbell_seen_ = 0;
};

/// How the ranks of a host find out whether they share memory: the lowest candidate makes a region,
/// the others fetch its file over the Unix socket and map it.
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
