#include "muster/launch/worker_news.h"

#include <unistd.h>

#include <cerrno>
#include <limits>

#include "muster/base/bytes.h"
#include "muster/base/socket_address.h"

namespace muster::launch {
namespace {

constexpr std::size_t kReasonShown = 2048;

Status read_all(int descriptor, std::string& bytes) {
  std::size_t have = 0;
  while (have < bytes.size()) {
    const ssize_t got = ::read(descriptor, bytes.data() + have, bytes.size() - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Status(Code::network, "reading the launcher's news: " + errno_text(errno));
    if (got == 0) return Status(Code::closed, "the launcher of this process has ended");
    have += static_cast<std::size_t>(got);
  }
  return {};
}

}  // namespace

std::string encode(const WorkerNews& news) {
  const std::string body = ByteWriter()
                               .put(news.kind)
                               .put(news.epoch)
                               .put(news.restarts)
                               .put(news.ranks)
                               .put_text(news.agent_store)
                               .put_text(news.master_addr)
                               .put(news.master_port)
                               .put_text(news.reason.substr(0, kReasonShown))
                               .take();
  return ByteWriter().put(static_cast<std::uint16_t>(body.size())).put_bytes(body).take();
}

Result<WorkerNews> read_worker_news(int descriptor) {
  std::string length(sizeof(std::uint16_t), '\0');
  if (Status got = read_all(descriptor, length); !got) return got;
  std::string body(ByteReader(length).get<std::uint16_t>(), '\0');
  if (Status got = read_all(descriptor, body); !got) return got;
  ByteReader reader(body);
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

}  // namespace muster::launch
