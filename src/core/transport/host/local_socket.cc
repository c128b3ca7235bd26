#include "core/transport/host/local_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <span>
#include <utility>

#include "core/base/log/log.h"
#include "core/net/socket_address.h"
#include "core/net/unix_socket.h"
#include "core/transport/connect/pending_connection.h"

namespace muster::transport {
namespace {

/// Waits for `events`; false at the deadline. It looks once more when that has passed, since this
/// process may have stood still.
bool wait_for(int socket, short events, TimePoint deadline) {
  for (;;) {
    const Duration left = deadline - steady_clock().now();
    const bool passed = left <= Duration::zero();
    // Not longer than a second at a time: a deadline may lie further away than poll's milliseconds
    // reach.
    const auto milliseconds =
        passed ? 0
               : std::min<std::int64_t>(
                     std::chrono::duration_cast<std::chrono::milliseconds>(left).count() + 1, 1000);
    pollfd one{socket, events, 0};
    if (::poll(&one, 1, static_cast<int>(milliseconds)) > 0) return true;
    if (passed) return false;
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

}  // namespace muster::transport
