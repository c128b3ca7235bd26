#include "core/transport/host/local_arenas.h"

#include "core/base/log/log.h"
#include "core/base/threads/thread_start.h"
#include "core/shm/arena/arena.h"
#include "core/transport/host/local_socket.h"
#include "muster/clock.h"

namespace muster::transport {
namespace {

constexpr Duration kFetchLimit = std::chrono::seconds(5);  // limit: patience

}  // namespace

LocalArenas::LocalArenas(int local_rank, std::vector<int> ranks,
                         const std::vector<PeerAddress>& contacts, Handshake::Hello hello,
                         Secret secret)
    : hello_(std::move(hello)), secret_(std::move(secret)) {
  const PeerAddress& mine = contacts[static_cast<std::size_t>(local_rank)];
  for (std::size_t place = 0; place < ranks.size(); ++place) {
    auto peer = std::make_unique<ArenaPeer>();
    peer->rank = ranks[place];
    peer->local_name = contacts[place].local_name;
    peer->is_this_process = same_process(mine, contacts[place]);
    peers_.push_back(std::move(peer));
  }
}

std::byte* LocalArenas::at(int local_rank, std::uint64_t offset, std::size_t bytes) {
  if (local_rank < 0 || static_cast<std::size_t>(local_rank) >= peers_.size()) return nullptr;
  ArenaPeer& peer = *peers_[static_cast<std::size_t>(local_rank)];
  if (peer.is_this_process) {
    const shm::Arena* const arena = shm::Arena::if_made();
    return arena != nullptr ? arena->at(offset, bytes) : nullptr;
  }
  shm::SharedMapping* mapping = peer.mapped.load(std::memory_order_acquire);
  if (mapping == nullptr) {
    // A failed prefetch is reported once; later calls try again.
    Fetch over = Fetch::over;
    if (peer.ahead.compare_exchange_strong(over, Fetch::idle)) return nullptr;
    mapping = fetch(peer);
  }
  if (mapping == nullptr || offset > mapping->bytes() || bytes > mapping->bytes() - offset)
    return nullptr;
  return mapping->memory() + offset;
}

bool LocalArenas::ready(int local_rank, std::function<void()> done) {
  if (local_rank < 0 || static_cast<std::size_t>(local_rank) >= peers_.size()) return true;
  ArenaPeer& peer = *peers_[static_cast<std::size_t>(local_rank)];
  if (peer.is_this_process || peer.mapped.load(std::memory_order_acquire) != nullptr) return true;
  Fetch state = Fetch::idle;
  if (!peer.ahead.compare_exchange_strong(state, Fetch::running)) return state == Fetch::over;
  // Detached, so that no thread has to wait for a peer that does not answer. It keeps alive what it
  // uses.
  auto thread = start_thread("the thread that maps the memory of a peer",
                             [self = shared_from_this(), &peer, done = std::move(done)] {
                               const bool mapped = self->fetch(peer) != nullptr;
                               peer.ahead.store(mapped ? Fetch::idle : Fetch::over,
                                                std::memory_order_release);
                               done();
                             });
  if (thread.ok()) {
    thread->detach();
    return false;
  }
  peer.ahead.store(Fetch::idle, std::memory_order_release);  // the caller maps it itself
  return true;
}

/// No lock is held while waiting for the peer. If two threads fetch at once, the second uses what
/// the first has installed.
shm::SharedMapping* LocalArenas::fetch(ArenaPeer& peer) {
  if (shm::SharedMapping* const there = peer.mapped.load(std::memory_order_acquire)) return there;
  const auto file = fetch_locally(peer.local_name, Want::arena, hello_, secret_,
                                  steady_clock().now() + kFetchLimit);
  auto mapping = file.ok() ? shm::map_shared(file->get(), 1)
                           : Result<std::shared_ptr<shm::SharedMapping>>(file.status());
  if (!mapping) {
    log(LogLevel::warning, "the shared arena of rank " + std::to_string(peer.rank) +
                               " cannot be mapped: " + mapping.status().message());
    return nullptr;
  }
  const std::lock_guard guard(peer.installing);
  if (peer.mapping != nullptr) return peer.mapping.get();
  peer.mapping = std::move(*mapping);
  peer.mapped.store(peer.mapping.get(), std::memory_order_release);
  return peer.mapping.get();
}

}  // namespace muster::transport
