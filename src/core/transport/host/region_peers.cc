#include "core/transport/host/region_peers.h"

#include <utility>

#include "core/base/log/log.h"
#include "core/transport/link/shared_stream.h"

namespace muster::transport {

Result<std::unique_ptr<RegionPeers>> RegionPeers::open(std::shared_ptr<shm::SharedMapping> mapping,
                                                       const shm::RegionShape& shape,
                                                       const PeerBook& book,
                                                       std::vector<int> places,
                                                       std::shared_ptr<LocalArenas> arenas) {
  std::unique_ptr<RegionPeers> peers(new RegionPeers(book, std::move(places)));
  RegionPeers* const self = peers.get();
  auto region = shm::open_region(
      mapping->memory(), shape, self->place_of(book.rank()), mapping,
      [arenas](int place, std::uint64_t offset, std::size_t bytes) {
        return arenas->at(place, offset, bytes);
      },
      [arenas, mapping, self](int place) {
        shm::HostRegion& of = *self->region_;
        return arenas->ready(
            place, [memory = mapping, box = &of.mailbox(of.local_rank())] { box->wake(); });
      },
      [self](int place) -> std::shared_ptr<shm::ProcessEnd> {
        const int rank = self->region_->ranks()[static_cast<std::size_t>(place)];
        if (!self->book_.is_process_here(rank)) return nullptr;
        const PeerAddress& other = self->book_.of(rank);
        return std::make_shared<shm::ProcessEnd>(other.pid, other.start_time);
      });
  if (!region) return region.status();
  peers->region_ = std::move(*region);
  peers->linked_.assign(shape.ranks.size(), false);
  return peers;
}

void RegionPeers::link(int place, ConnectorEvents& events) {
  if (linked_[static_cast<std::size_t>(place)]) return;
  linked_[static_cast<std::size_t>(place)] = true;
  const int rank = region_->ranks()[static_cast<std::size_t>(place)];
  if (logs(LogLevel::debug))
    log(LogLevel::debug, "linked to " + book_.name(rank) + " through shared memory");
  events.on_stream(rank, open_shared_stream(*region_, place));
}

bool RegionPeers::poll(ConnectorEvents& events) {
  bool moved = false;
  const std::uint32_t doorbell = shared_stream_doorbell(*region_);
  if (doorbell != doorbell_seen_) {
    doorbell_seen_ = doorbell;
    for (std::size_t place = 0; place < linked_.size(); ++place) {
      if (linked_[place] || !shared_stream_awaits(*region_, static_cast<int>(place))) continue;
      link(static_cast<int>(place), events);
      moved = true;
    }
  }
  while (!asked_.empty()) {
    const int place = asked_.back();
    asked_.pop_back();
    link(place, events);
    moved = true;
  }
  return moved;
}

void RegionPeers::look_for_leavers(const std::function<void(int rank)>& left) {
  for (std::size_t place = 0; place < linked_.size(); ++place) {
    const int rank = region_->ranks()[place];
    const shm::Mailbox& box = region_->mailbox(static_cast<int>(place));
    if (rank != book_.rank() && box.aborted.load(std::memory_order_acquire) != 0) left(rank);
  }
}

}  // namespace muster::transport
