// SPDX-License-Identifier: BSD-3-Clause
#include "core/net/unix_socket.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <thread>

#include "core/net/socket_address.h"

namespace muster {
namespace {

struct LocalName {
  sockaddr_un address{};
  socklen_t length = 0;
};

LocalName name_from(const std::string& name) {
  LocalName out;
  out.address.sun_family = AF_UNIX;
  const std::size_t bytes = std::min(name.size(), sizeof out.address.sun_path - 1);
  std::memcpy(out.address.sun_path + 1, name.data(), bytes);  // the first byte stays zero: abstract
  out.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + bytes);
  return out;
}

}  // namespace

Result<Descriptor> listen_locally(const std::string& name) {
  Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return Status(Code::exhausted, "cannot make a Unix socket: " + errno_text(errno));
  const LocalName address = name_from(name);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address.address), address.length) !=
          0 ||
      ::listen(socket.get(), SOMAXCONN) != 0) {
    return Status(Code::network,
                  "cannot listen on the abstract Unix socket " + name + ": " + errno_text(errno));
  }
  return socket;
}

Result<Descriptor> connect_locally(const std::string& name, TimePoint deadline) {
  const LocalName address = name_from(name);
  for (;;) {
    const TimePoint now = steady_clock().now();  // before it tries: it may stand still afterwards
    Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket) return Status(Code::exhausted, "cannot make a Unix socket: " + errno_text(errno));
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.address),
                  address.length) == 0)
      return socket;
    if (errno != EAGAIN && errno != EINTR) {
      return Status(Code::refused,
                    "no Unix socket " + name + " can be reached from here: " + errno_text(errno));
    }
    // EAGAIN: too many wait there to be accepted, and nothing tells when there is room.
    if (now >= deadline)
      return Status(Code::timed_out, "the deadline passed while the Unix socket " + name +
                                         " had no room for another connection");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // limit: load of a full queue
  }
}

namespace {

/// Whether every user of the machine has a number of its own here: in a container, those that are
/// not mapped there share one.
bool knows_all_users() {
  static const bool knows = [] {
    std::uint64_t inside = 0, outside = 0, count = 0;
    std::ifstream("/proc/self/uid_map") >> inside >> outside >> count;
    return inside == 0 && count >= std::numeric_limits<std::uint32_t>::max();
  }();
  return knows;
}

}  // namespace

bool is_same_user(int socket) {
  static const uid_t nobody = [] {
    uid_t number = 65534;  // limit: Linux's own default
    std::ifstream("/proc/sys/kernel/overflowuid") >> number;
    return number;
  }();
  ucred peer{};
  socklen_t length = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         (peer.uid != nobody || knows_all_users()) && peer.uid == ::geteuid();
}

namespace {

constexpr std::size_t kControlBytes = CMSG_SPACE(kMostDescriptors * sizeof(int));

}  // namespace

DescriptorMessage receive_descriptors(int socket, MutableBytes into, int flags) {
  alignas(cmsghdr) std::array<char, kControlBytes> control;
  iovec part{into.data(), into.size()};
  msghdr message{};
  DescriptorMessage received;
  do {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    received.bytes = ::recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
  } while (received.bytes < 0 && errno == EINTR);
  if (received.bytes < 0) return received;
  received.cut_off = (message.msg_flags & MSG_CTRUNC) != 0;
  for (cmsghdr* each = CMSG_FIRSTHDR(&message); each != nullptr;
       each = CMSG_NXTHDR(&message, each)) {
    if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (each->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int one = -1;
      std::memcpy(&one, CMSG_DATA(each) + i * sizeof(int), sizeof one);
      received.descriptors.emplace_back(one);
    }
  }
  return received;
}

bool send_descriptors(int socket, ConstBytes bytes, std::span<const int> descriptors, int flags) {
  alignas(cmsghdr) std::array<char, kControlBytes> control{};
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* const rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size_bytes());
  }
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket, &message, flags | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent >= 0;
}

}  // namespace muster
