#include "muster/transport/local_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "muster/base/socket_address.h"
#include "muster/base/unix_socket.h"
#include "muster/transport/pending_connection.h"

namespace muster::transport {
namespace {

/// Waits for `events`; false at the deadline.
bool wait_for(int socket, short events, TimePoint deadline) {
  for (;;) {
    const Duration left = deadline - steady_clock().now();
    if (left <= Duration::zero()) return false;
    // Not longer than a second at a time: a deadline may lie further away than poll's milliseconds
    // reach.
    const auto milliseconds = std::min<std::int64_t>(
        std::chrono::duration_cast<std::chrono::milliseconds>(left).count() + 1, 1000);
    pollfd one{socket, events, 0};
    if (::poll(&one, 1, static_cast<int>(milliseconds)) > 0) return true;
  }
}

Status too_late(const std::string& what) {
  return Status(Code::timed_out, "the deadline passed while " + what);
}

/// One byte says whether a descriptor comes with it.
Result<Descriptor> receive_descriptor(int socket, TimePoint deadline) {
  std::byte answer{};
  iovec piece{&answer, 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * 4)> control{};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got;
  while ((got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT)) < 0) {
    if (errno != EAGAIN && errno != EINTR)
      return Status(Code::network, "receiving a memory file: " + errno_text(errno));
    if (!wait_for(socket, POLLIN, deadline)) return too_late("a memory file was awaited");
  }
  Descriptor received;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof fd);
      Descriptor each(fd);
      if (!received) received = std::move(each);
    }
  }
  if (got == 0)
    return Status(Code::network, "the other side hung up before it passed a memory file");
  if (answer == std::byte{0})
    return Status(Code::unsupported, "the other side has nothing to share");
  if (!received)
    return Status(Code::exhausted,
                  "a memory file was passed but did not arrive: no descriptor is free here (raise "
                  "ulimit -n)");
  return received;
}

}  // namespace

void answer_with(int socket, int passed) {
  std::byte answer{static_cast<unsigned char>(passed >= 0 ? 1 : 0)};
  iovec piece{&answer, 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (passed >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(part), &passed, sizeof passed);
  }
  // One byte into an empty buffer does not block; it fails only if the peer is gone.
  while (::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && errno == EINTR) {
  }
}

Result<Descriptor> fetch_locally(const std::string& name, Want want, Handshake::Hello hello,
                                 const Secret& secret, TimePoint deadline) {
  auto socket = connect_locally(name, deadline);
  if (!socket) return socket.status();
  if (!is_same_user(socket->get())) {
    return Status(Code::refused, "the process behind the Unix socket " + name +
                                     " is run by another user: it is not a rank of this job");
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
