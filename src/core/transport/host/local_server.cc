#include "core/transport/host/local_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "core/base/threads/thread_start.h"
#include "core/net/socket_address.h"
#include "core/shm/arena/arena.h"
#include "core/transport/host/local_socket.h"

namespace muster::transport {

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
    const Duration pause = std::clamp(acceptor_->next_timer() - steady_clock().now(),
                                      Duration::zero(), Duration(std::chrono::seconds(1)));
    const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(pause).count();
    // After a signal both are simply looked at again.
    if (::poll(waits.data(), waits.size(), static_cast<int>(milliseconds) + 1) < 0) continue;
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

}  // namespace muster::transport
