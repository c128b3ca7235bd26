#include "core/net/unix_socket.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
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

}  // namespace muster
