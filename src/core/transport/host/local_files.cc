// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/host/local_files.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <span>
#include <utility>

#include "core/base/descriptor.h"
#include "core/base/log/log.h"
#include "core/base/threads/thread_start.h"
#include "core/net/socket_address.h"
#include "core/net/unix_socket.h"
#include "core/shm/arena/arena.h"
#include "core/transport/connect/pending_connection.h"
#include "muster/clock.h"

namespace muster::transport {
namespace {

/// Waits for `events`; false at the deadline. It looks once more when that has passed, since this
/// process may have stood still.
bool wait_for(int socket, short events, TimePoint deadline) {
  for (;;) {
    const TimePoint now = steady_clock().now();
    pollfd one{socket, events, 0};
    if (::poll(&one, 1, poll_milliseconds(now, deadline)) > 0) return true;
    if (now >= deadline) return false;
  }
}

Status too_late(const std::string& what) {
  return Status(Code::timed_out, "the deadline passed while " + what);
}

/// One byte says whether a descriptor comes with it.
Result<Descriptor> receive_descriptor(int socket, TimePoint deadline) {
  std::byte answer{};
  DescriptorMessage message;
  while ((message = receive_descriptors(socket, {&answer, 1}, MSG_DONTWAIT)).bytes < 0) {
    if (errno != EAGAIN)
      return Status(Code::network, "receiving a memory file: " + errno_text(errno));
    if (!wait_for(socket, POLLIN, deadline)) return too_late("a memory file was awaited");
  }
  if (message.bytes == 0)
    return Status(Code::network, "the other side hung up before it passed a memory file");
  if (answer == std::byte{0})
    return Status(Code::unsupported, "the other side has nothing to share");
  if (message.descriptors.empty())
    return Status(Code::exhausted,
                  "a memory file was passed but did not arrive: no descriptor is free here (raise "
                  "ulimit -n)");
  return std::move(message.descriptors.front());
}

}  // namespace

void answer_with(int socket, int passed) {
  // One byte into an empty buffer does not block.
  const auto send = [&](unsigned char answer, std::span<const int> descriptors) {
    const std::byte byte{answer};
    return send_descriptors(socket, {&byte, 1}, descriptors, MSG_DONTWAIT);
  };
  if (passed >= 0 && send(1, {&passed, 1})) return;
  // The system may refuse to pass a descriptor (too many are in flight): without an answer the peer
  // would wait for it. If that fails too, the peer is gone.
  if (!send(0, {}) && logs(LogLevel::debug))
    log(LogLevel::debug, "a process of this host has not waited for its answer");
}

Result<Descriptor> fetch_locally(const std::string& name, Want want, Handshake::Hello hello,
                                 const Secret& secret, TimePoint deadline) {
  auto socket = connect_locally(name, deadline);
  if (!socket) return socket.status();
  if (!is_same_user(socket->get())) {
    return Status(Code::refused,
                  "the process behind the Unix socket " + name +
                      " is run by another user, or by one that has no number of its own in "
                      "this container (user 65534): it is not trusted as a rank of "
                      "this job");
  }
  hello.note = static_cast<std::uint64_t>(want);
  PendingConnection connection(GuardedDescriptor(std::move(*socket)), hello, secret,
                               {.way = Way::unix_socket, .limit = deadline});
  for (;;) {
    const auto progress = connection.advance([](const Handshake::Peer&) { return true; });
    if (progress == PendingConnection::HandshakeProgress::failed) return connection.failure();
    if (progress == PendingConnection::HandshakeProgress::done) break;
    const bool writes = (connection.epoll_events() & POLLOUT) != 0;
    if (!wait_for(connection.descriptor(), static_cast<short>(writes ? POLLIN | POLLOUT : POLLIN),
                  deadline)) {
      return too_late("the process behind the Unix socket " + name +
                      " was to prove the job's secret");
    }
  }
  return receive_descriptor(connection.descriptor(), deadline);
}

LocalServer::~LocalServer() {
  if (!mark_.forked()) {
    stop_thread();
  } else if (thread_.joinable()) {
    thread_.detach();  // it runs in the parent
  }
}

Status LocalServer::listen(const std::string& name, const Handshake::Hello& hello,
                           const Secret& secret) {
  auto listener = listen_locally(name);
  if (!listener) return listener.status();
  AcceptorOptions options;
  options.hello = hello;
  options.way = Way::unix_socket;
  options.admit = is_same_user;
  options.arrived = [this](const AuthenticatedSocket& asks) { answer(asks); };
  acceptor_ = std::make_unique<Acceptor>(std::move(options), secret);
  return acceptor_->serve(std::move(*listener));
}

/// A local rank that has proved the secret asks for memory.
void LocalServer::answer(const AuthenticatedSocket& asks) const {
  const int socket = asks.socket.get();
  switch (static_cast<Want>(asks.peer.note)) {
    case Want::region: return answer_with(socket, region_file_.get());
    case Want::arena: {
      const shm::Arena* const arena = shm::Arena::if_made();
      return answer_with(socket, arena != nullptr ? arena->descriptor() : -1);
    }
  }
  answer_with(socket, -1);
}

void LocalServer::serve() {
  for (;;) {
    std::array<pollfd, 2> waits{pollfd{acceptor_->descriptor(), POLLIN, 0},
                                pollfd{stop_.get(), POLLIN, 0}};
    const TimePoint now = steady_clock().now();
    const TimePoint until = std::min(acceptor_->next_timer(), now + std::chrono::seconds(1));
    // After a signal both are simply looked at again.
    if (::poll(waits.data(), waits.size(), poll_milliseconds(now, until)) < 0) continue;
    if (waits[1].revents != 0) return;
    acceptor_->poll(steady_clock().now());
  }
}

Status LocalServer::start_thread() {
  stop_ = GuardedDescriptor(Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)));
  if (!stop_)
    return Status(Code::exhausted,
                  "cannot make the descriptor that stops a thread: " + errno_text(errno));
  auto thread = muster::start_thread(
      "the thread that hands the shared region to the other ranks of this host",
      [this] { serve(); });
  if (!thread.ok()) return thread.status();
  thread_ = std::move(*thread);
  return {};
}

void LocalServer::stop_thread() {
  if (!thread_.joinable()) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(stop_.get(), &one, sizeof one);
  thread_.join();
  stop_.reset();
}

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
