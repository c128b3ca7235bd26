#include "muster/launch/worker_news.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>

#include "muster/base/bytes.h"
#include "muster/base/socket_address.h"

namespace muster::launch {
namespace {

constexpr std::size_t kReasonShown = 2048;
constexpr std::size_t kLongestNews = 8192;  // a name of a host has at most 255 bytes

/// What `recv` returns. A reset is the peer's end, behind which there may be records of it.
ssize_t receive(int descriptor, std::array<char, kLongestNews>& into, int flags) {
  for (;;) {
    const ssize_t got = ::recv(descriptor, into.data(), into.size(), flags);
    if (got >= 0 || (errno != EINTR && errno != ECONNRESET)) return got;
  }
}

std::string encode(const WorkerNews& news) {
  return ByteWriter()
      .put(news.kind)
      .put(news.epoch)
      .put(news.restarts)
      .put(news.ranks)
      .put_text(news.agent_store)
      .put_text(news.master_addr)
      .put(news.master_port)
      .put_text(news.reason.substr(0, kReasonShown))
      .take();
}

}  // namespace

Result<WorkerChannel> make_worker_channel() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    return Status(Code::exhausted, "no pair of sockets for a worker: " + errno_text(errno));
  return WorkerChannel{Descriptor(ends[0]), Descriptor(ends[1])};
}

bool is_worker_channel(int descriptor) {
  int domain = 0, type = 0;
  socklen_t size = sizeof(int);
  return ::getsockopt(descriptor, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 &&
         ::getsockopt(descriptor, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && domain == AF_UNIX &&
         type == SOCK_SEQPACKET;
}

void tell_worker(int descriptor, const WorkerNews& news) {
  const std::string record = encode(news);
  ::send(descriptor, record.data(), record.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
}

bool take_trained(int descriptor) {
  std::array<char, kLongestNews> record;
  return receive(descriptor, record, MSG_DONTWAIT) > 0;
}

Result<WorkerNews> read_worker_news(int descriptor) {
  std::array<char, kLongestNews> record;
  const ssize_t got = receive(descriptor, record, 0);
  if (got < 0) return Status(Code::network, "reading the launcher's news: " + errno_text(errno));
  if (got == 0) return Status(Code::closed, "the launcher of this process has ended");
  ByteReader reader(std::string_view(record.data(), static_cast<std::size_t>(got)));
  WorkerNews news;
  news.kind = reader.get<WorkerNewsKind>();
  news.epoch = reader.get<std::int64_t>();
  news.restarts = reader.get<int>();
  news.ranks = reader.get<WorkerRanks>();
  news.agent_store = reader.get_text();
  news.master_addr = reader.get_text();
  news.master_port = reader.get<std::uint16_t>();
  news.reason = reader.get_text();
  if (reader.at_end() && news.kind <= WorkerNewsKind::leave) return news;
  return Status(Code::mismatch,
                "the launcher tells its workers what this version does not know; run `muster run` "
                "and the program with the same muster");
}

void tell_trained(int descriptor) { ::send(descriptor, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL); }

}  // namespace muster::launch
