// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/byte_stream.h"

#include <algorithm>
#include <cstring>

#include "core/base/bytes.h"
#include "core/base/process/fork_guard.h"
#include "core/base/threads/host_barrier.h"
#include "core/shm/cache_lines.h"
#include "core/shm/host_region.h"
#include "core/shm/region_view.h"
#include "core/tunables/tunables.h"

namespace muster::transport {
namespace {

// After this many bytes the position is published, so that the other side can copy in parallel.
constexpr std::size_t kStep = fixed::kLeastMessage;

class SharedStream final : public ByteStream {
 public:
  SharedStream(shm::RegionView& region, int peer)
      : out_(region.ring(region.local_rank(), peer)),
        in_(region.ring(peer, region.local_rank())),
        peer_mailbox_(region.mailbox(peer)),
        peer_(peer),
        memory_(region.owner()) {
    cached_head_ = out_.control->head.load(std::memory_order_acquire);
    tail_ = out_.control->tail.load(std::memory_order_relaxed);
    head_ = in_.control->head.load(std::memory_order_relaxed);
  }
  ~SharedStream() override {
    if (mark_.forked()) return;
    out_.control->ended.store(1, std::memory_order_seq_cst);
    in_.control->reader_gone.store(1, std::memory_order_seq_cst);
    peer_mailbox_.wake();
  }

  Result<std::size_t> write(std::span<const ConstBytes> pieces) override;
  Result<std::size_t> read(std::span<const MutableBytes> pieces) override;
  std::array<ConstBytes, 2> look() override;
  void drop(std::size_t bytes) override;
  int descriptor() const override { return -1; }
  const char* kind() const override { return "shm"; }

 private:
  std::size_t room() const { return out_.bytes - static_cast<std::size_t>(tail_ - cached_head_); }
  std::size_t published() const {
    return static_cast<std::size_t>(in_.control->tail.load(std::memory_order_acquire) - head_);
  }
  bool make_room();
  void announce();
  void put(ConstBytes piece);
  void take(MutableBytes piece);
  void tell_writer();
  Status broken(const char* what) const {
    return Status(Code::internal,
                  std::string("the shared ring ") + what + " local rank " + std::to_string(peer_) +
                      " holds impossible positions: something has overwritten the host region");
  }

  shm::SharedRing out_;
  shm::SharedRing in_;
  shm::Mailbox& peer_mailbox_;
  int peer_;
  bool quietly_ = false;          // see announce()
  std::shared_ptr<void> memory_;  // may outlive the region's view
  std::uint64_t tail_ = 0;        // ours in out_
  std::uint64_t cached_head_ =
      0;                    // the peer's in out_, as last seen: a look at it costs a cache line
  std::uint64_t head_ = 0;  // ours in in_
  ProcessMark mark_;
};

/// Rereads the reader's position. If there is no room, requests a wake-up and checks once more, so
/// that no wake-up is lost.
bool SharedStream::make_room() {
  cached_head_ = out_.control->head.load(std::memory_order_acquire);
  if (room() > 0) return true;
  out_.control->writer_waits.store(1, std::memory_order_seq_cst);
  cached_head_ = out_.control->head.load(std::memory_order_seq_cst);
  return room() > 0;
}

void SharedStream::put(ConstBytes piece) {
  const std::size_t at = static_cast<std::size_t>(tail_) & (out_.bytes - 1);
  const std::size_t first = std::min(piece.size(), out_.bytes - at);
  if (piece.size() <= fixed::kShortPiece && first == piece.size()) {
    copy_few(out_.data + at, piece.data(), first);
  } else {
    std::memcpy(out_.data + at, piece.data(), first);
    std::memcpy(out_.data, piece.data() + first, piece.size() - first);
  }
  tail_ += piece.size();
}

void SharedStream::take(MutableBytes piece) {
  const std::size_t at = static_cast<std::size_t>(head_) & (in_.bytes - 1);
  const std::size_t first = std::min(piece.size(), in_.bytes - at);
  shm::copy_and_reclaim_lines(piece.data(), in_.data + at, first);
  shm::copy_and_reclaim_lines(piece.data() + first, in_.data, piece.size() - first);
  head_ += piece.size();
}

void SharedStream::tell_writer() {
  in_.control->head.store(head_, std::memory_order_seq_cst);
  if (in_.control->writer_waits.load(std::memory_order_seq_cst) != 0 &&
      in_.control->writer_waits.exchange(0) != 0)
    peer_mailbox_.wake();
}

std::array<ConstBytes, 2> SharedStream::look() {
  const std::size_t there = published();
  if (there > in_.bytes) return {};  // `read` says so
  const std::size_t at = static_cast<std::size_t>(head_) & (in_.bytes - 1);
  const std::size_t first = std::min(there, in_.bytes - at);
  return {ConstBytes(in_.data + at, first), ConstBytes(in_.data, there - first)};
}

void SharedStream::drop(std::size_t bytes) {
  const std::size_t at = static_cast<std::size_t>(head_) & (in_.bytes - 1);
  const std::size_t first = std::min(bytes, in_.bytes - at);
  shm::reclaim_lines(in_.data + at, first);
  shm::reclaim_lines(in_.data, bytes - first);
  head_ += bytes;
  tell_writer();
}

Result<std::size_t> SharedStream::write(std::span<const ConstBytes> pieces) {
  if (mark_.forked())
    return Status(Code::aborted, "a forked child cannot use its parent's connections");
  if (out_.control->reader_gone.load(std::memory_order_acquire) != 0) {
    return Status(Code::closed, "local rank " + std::to_string(peer_) +
                                    " has closed its side of the shared ring");
  }
  std::size_t written = 0;
  for (ConstBytes piece : pieces) {
    while (!piece.empty()) {
      if (room() == 0) {
        // The reader may read what has been written so far.
        out_.control->tail.store(tail_, std::memory_order_seq_cst);
        if (!make_room()) {
          if (room() > out_.bytes) return broken("towards");
          if (written > 0) peer_mailbox_.wake();
          return written;
        }
        if (room() > out_.bytes) return broken("towards");
      }
      const std::size_t now = std::min({piece.size(), room(), kStep});
      put(piece.first(now));
      piece = piece.subspan(now);
      written += now;
      if (!piece.empty()) out_.control->tail.store(tail_, std::memory_order_release);
    }
  }
  if (written > 0) announce();
  return written;
}

/// Publishes all written bytes to the reader. Needs no fence if sleeping readers send a host
/// barrier first.
void SharedStream::announce() {
  if (quietly_ || (quietly_ = takes_host_barriers() &&
                              peer_mailbox_.sends_barriers.load(std::memory_order_relaxed) != 0)) {
    out_.control->tail.store(tail_, std::memory_order_release);
    meet_host_barrier();
    peer_mailbox_.wake_announced();
  } else {
    out_.control->tail.store(tail_, std::memory_order_seq_cst);
    peer_mailbox_.wake();
  }
}

Result<std::size_t> SharedStream::read(std::span<const MutableBytes> pieces) {
  if (mark_.forked())
    return Status(Code::aborted, "a forked child cannot use its parent's connections");
  // Load the end flag before the position, so that all bytes published before the end are seen.
  const bool ended = in_.control->ended.load(std::memory_order_acquire) != 0;
  std::size_t available = published();
  if (available > in_.bytes) return broken("from");
  if (available == 0) {
    if (ended)
      return Status(Code::closed, "local rank " + std::to_string(peer_) +
                                      " has closed its side of the shared ring");
    return std::size_t{0};
  }
  std::size_t got = 0;
  for (MutableBytes piece : pieces) {
    while (!piece.empty()) {
      if (available == 0) {
        available = published();
        if (available > in_.bytes) return broken("from");
      }
      const std::size_t now = std::min({piece.size(), available, kStep});
      if (now == 0) break;
      take(piece.first(now));
      piece = piece.subspan(now);
      available -= now;
      got += now;
      if (!piece.empty()) in_.control->head.store(head_, std::memory_order_release);
    }
    if (!piece.empty()) break;  // the next bytes belong into this piece
  }
  if (got > 0) tell_writer();
  return got;
}

}  // namespace

std::unique_ptr<ByteStream> open_shared_stream(shm::HostRegion& region, int peer_local_rank) {
  auto& view = static_cast<shm::RegionView&>(region);
  auto stream = std::make_unique<SharedStream>(view, peer_local_rank);
  shm::RingControl& out = *view.ring(view.local_rank(), peer_local_rank).control;
  if (out.opened.exchange(1, std::memory_order_acq_rel) == 0) {
    view.doorbell(peer_local_rank).opened.fetch_add(1, std::memory_order_seq_cst);
    view.mailbox(peer_local_rank).wake();
  }
  return stream;
}

std::uint32_t shared_stream_doorbell(shm::HostRegion& region) {
  auto& view = static_cast<shm::RegionView&>(region);
  return view.doorbell(view.local_rank()).opened.load(std::memory_order_acquire);
}

bool shared_stream_awaits(shm::HostRegion& region, int peer_local_rank) {
  auto& view = static_cast<shm::RegionView&>(region);
  return view.ring(peer_local_rank, view.local_rank())
             .control->opened.load(std::memory_order_acquire) != 0;
}

}  // namespace muster::transport
