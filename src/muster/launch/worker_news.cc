#include "muster/launch/worker_news.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "muster/base/bytes.h"
#include "muster/base/socket_address.h"

namespace muster::launch {
namespace {

constexpr std::size_t kReasonShown = 2048;
constexpr std::size_t kLongestNews = 8192;  // a name of a host has at most 255 bytes

// A worker's words.
constexpr char kTrained = 0, kMemories = 1;

/// One record and the descriptors that came with it. `bytes`: what `recvmsg` returns.
struct WorkerRecordRead {
  ssize_t bytes = 0;
  std::array<char, kLongestNews> text;
  std::vector<Descriptor> descriptors;

  std::string_view view() const { return {text.data(), static_cast<std::size_t>(bytes)}; }
};

/// A reset is the peer's end, behind which there may be records of it.
void receive(int descriptor, WorkerRecordRead& into, int flags) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMostMemories * sizeof(int))> control;
  iovec part{into.text.data(), into.text.size()};
  msghdr message{};
  do {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    into.bytes = ::recvmsg(descriptor, &message, flags | MSG_CMSG_CLOEXEC);
  } while (into.bytes < 0 && (errno == EINTR || errno == ECONNRESET));
  into.descriptors.clear();
  if (into.bytes < 0) return;
  for (cmsghdr* each = CMSG_FIRSTHDR(&message); each != nullptr;
       each = CMSG_NXTHDR(&message, each)) {
    if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (each->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int one = -1;
      std::memcpy(&one, CMSG_DATA(each) + i * sizeof(int), sizeof one);
      into.descriptors.emplace_back(one);
    }
  }
}

/// With descriptors, of which there is at least one.
bool send_with(int channel, std::string_view record, std::span<const int> descriptors) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMostMemories * sizeof(int))> control{};
  iovec part{const_cast<char*>(record.data()), record.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
  cmsghdr* const rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(descriptors.size_bytes());
  std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size_bytes());
  return ::sendmsg(channel, &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0;
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

void tell_memories(int descriptor, std::span<const Descriptor> memories) {
  if (memories.empty()) return;
  WorkerNews news;
  news.kind = WorkerNewsKind::memories;
  std::vector<int> numbers;
  for (const Descriptor& each : memories) numbers.push_back(each.get());
  send_with(descriptor, encode(news), numbers);
}

WorkerWords take_words(int descriptor) {
  WorkerWords words;
  WorkerRecordRead record;
  for (;;) {
    receive(descriptor, record, MSG_DONTWAIT);
    if (record.bytes <= 0) return words;
    if (record.text[0] == kTrained) words.trained = true;
    if (record.text[0] == kMemories) words.memories = std::move(record.descriptors);
  }
}

Result<WorkerNews> read_worker_news(int descriptor, std::vector<Descriptor>& memories) {
  WorkerRecordRead record;
  receive(descriptor, record, 0);
  if (record.bytes < 0)
    return Status(Code::network, "reading the launcher's news: " + errno_text(errno));
  if (record.bytes == 0) return Status(Code::closed, "the launcher of this process has ended");
  ByteReader reader(record.view());
  WorkerNews news;
  news.kind = reader.get<WorkerNewsKind>();
  news.epoch = reader.get<std::int64_t>();
  news.restarts = reader.get<int>();
  news.ranks = reader.get<WorkerRanks>();
  news.agent_store = reader.get_text();
  news.master_addr = reader.get_text();
  news.master_port = reader.get<std::uint16_t>();
  news.reason = reader.get_text();
  if (news.kind == WorkerNewsKind::memories) memories = std::move(record.descriptors);
  if (reader.at_end() && news.kind <= WorkerNewsKind::memories) return news;
  return Status(Code::mismatch,
                "the launcher tells its workers what this version does not know; run `muster run` "
                "and the program with the same muster");
}

bool has_worker_news(int descriptor) {
  char first = 0;
  return ::recv(descriptor, &first, 1, MSG_PEEK | MSG_DONTWAIT) >= 0;
}

void tell_trained(int descriptor) { ::send(descriptor, &kTrained, 1, MSG_DONTWAIT | MSG_NOSIGNAL); }

Status give_memories(int descriptor, std::span<const int> memories) {
  if (memories.size() > kMostMemories)
    return {Code::exhausted, "a launcher holds at most " + std::to_string(kMostMemories) +
                                 " memory files for a worker, and not " +
                                 std::to_string(memories.size()) +
                                 "; give the nodes of the job more equal numbers of workers"};
  if (memories.empty() || send_with(descriptor, {&kMemories, 1}, memories)) return {};
  return {Code::network,
          "the launcher does not take the memory of this process's commits: " + errno_text(errno)};
}

}  // namespace muster::launch
