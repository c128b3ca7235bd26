// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/host/region_peers.h"

#include <utility>

#include "core/base/log/log.h"
#include "core/transport/byte_stream.h"
#include "core/transport/host/local_files.h"

namespace muster::transport {

Result<std::unique_ptr<RegionPeers>> RegionPeers::open(std::shared_ptr<shm::SharedMapping> mapping,
                                                       const shm::RegionShape& shape,
                                                       const PeerBook& book,
                                                       std::vector<int> places,
                                                       std::shared_ptr<LocalArenas> arenas) {
  std::unique_ptr<RegionPeers> peers(new RegionPeers(book, std::move(places)));
  RegionPeers* const self = peers.get();
  // The functions use `self`, which owns the region that keeps them. The thread that maps an arena
  // may outlive both, so it holds the mapping of the mailbox that it wakes.
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

Status RegionMeeting::listen(const std::string& name, Handshake::Hello hello) {
  hello_ = hello;
  hello_.role = Handshake::Role::region;
  return options_.shared_memory ? server_.listen(name, hello_, secret_) : Status();
}

shm::RegionShape RegionMeeting::shape_for(std::vector<int> ranks, int maker) const {
  shm::RegionShape shape;
  shape.ranks = std::move(ranks);
  shape.ring_bytes = options_.ring_bytes;
  shape.segment_bytes = options_.segment_bytes;
  shape.places = candidates_;
  shape.nonce = book_.of(maker).nonce;
  return shape;
}

Status RegionMeeting::make(const std::vector<int>& ranks) {
  const shm::RegionShape shape = shape_for(ranks, book_.rank());
  auto file = shm::make_memory_file("muster-region", shm::region_bytes(shape));
  if (!file) return file.status();
  auto mapping = shm::map_shared(file->get(), shm::region_bytes(shape));
  if (!mapping) return mapping.status();
  shm::lay_out_region((*mapping)->memory(), shape);
  mapping_ = std::move(*mapping);
  server_.set_region(GuardedDescriptor(std::move(*file)));
  return {};
}

Status RegionMeeting::fetch(const std::vector<int>& ranks, TimePoint deadline) {
  const int maker = ranks.front();
  const shm::RegionShape shape = shape_for(ranks, maker);
  const auto file =
      fetch_locally(book_.of(maker).local_name, Want::region, hello_, secret_, deadline);
  if (!file) return file.status();
  auto mapping = shm::map_shared(file->get(), shm::region_bytes(shape));
  if (!mapping) return mapping.status();
  if (Status checked = shm::check_region((*mapping)->memory(), shape); !checked) return checked;
  mapping_ = std::move(*mapping);
  return {};
}

Result<MeetingVerdict> RegionMeeting::meet(TimePoint deadline) {
  const std::vector<int> ranks =
      options_.shared_memory ? book_.candidates() : std::vector<int>{book_.rank()};
  candidates_ = ranks.size();
  MeetingVerdict verdict;
  if (ranks.size() < 2) {
    verdict.reason = options_.shared_memory ? "it is alone on its host" : "shared memory is off";
    return verdict;
  }
  const int maker = ranks.front();
  const bool makes = maker == book_.rank();
  const Status mapped = makes ? make(ranks) : fetch(ranks, deadline);
  // Serves even without a region: the others' requests are then answered with that.
  if (makes) {
    if (Status serves = server_.start_thread(); !serves) return serves;
  }
  if (mapped.code() == Code::timed_out) {
    return Status(Code::timed_out,
                  "meeting " + book_.name(maker) + " on this host: " + mapped.message(), {maker});
  }
  verdict.mapped = mapped.ok();
  verdict.maker = maker;
  verdict.nonce = book_.of(maker).nonce;
  verdict.reason = mapped.message();
  if (!mapped) {
    log(LogLevel::warning, "no memory is shared with " + book_.name(maker) +
                               ", sockets are used instead: " + mapped.message());
  }
  return verdict;
}

Result<std::unique_ptr<RegionPeers>> RegionMeeting::settle(
    const std::vector<MeetingVerdict>& verdicts) {
  server_.stop_thread();
  server_.set_region({});
  std::vector<int> places(verdicts.size(), -1);
  std::vector<int> ranks;
  std::vector<PeerAddress> contacts;
  const MeetingVerdict& own = verdicts[static_cast<std::size_t>(book_.rank())];
  for (std::size_t rank = 0; own.mapped && rank < verdicts.size(); ++rank) {
    const MeetingVerdict& other = verdicts[rank];
    if (!other.mapped || other.maker != own.maker || other.nonce != own.nonce) continue;
    places[rank] = static_cast<int>(ranks.size());
    ranks.push_back(static_cast<int>(rank));
    contacts.push_back(book_.of(static_cast<int>(rank)));
  }
  auto mapping = std::exchange(mapping_, nullptr);
  if (ranks.size() < 2) return std::unique_ptr<RegionPeers>();
  const int place = places[static_cast<std::size_t>(book_.rank())];
  auto arenas = std::make_shared<LocalArenas>(place, ranks, contacts, hello_, secret_);
  return RegionPeers::open(std::move(mapping), shape_for(ranks, own.maker), book_,
                           std::move(places), std::move(arenas));
}

}  // namespace muster::transport
