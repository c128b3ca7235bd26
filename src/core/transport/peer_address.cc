#include "core/transport/peer_address.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>

#include "core/base/bytes.h"
#include "core/base/process/process_start.h"
#include "core/wait/topology.h"

namespace muster::transport {
namespace {

constexpr std::uint8_t kContactVersion = 5;
constexpr std::uint32_t kMostAddresses = 64;  // limit: of a record

// Namespaces of the calling thread, which decide what its sockets can reach.
std::uint64_t namespace_inode(const char* kind) {
  struct stat file {};
  const std::string path = std::string("/proc/thread-self/ns/") + kind;
  return ::stat(path.c_str(), &file) == 0 ? static_cast<std::uint64_t>(file.st_ino) : 0;
}

/// A bit for each number, as many bytes as are needed.
std::string bits_of(const std::vector<int>& numbers) {
  std::string bits;
  for (const int number : numbers) {
    const auto at = static_cast<std::size_t>(number);
    bits.resize(std::max(bits.size(), at / 8 + 1));
    bits[at / 8] = static_cast<char>(bits[at / 8] | 1 << at % 8);
  }
  return bits;
}

Status malformed(const char* what, int rank) {
  return Status(Code::refused,
                "what rank " + std::to_string(rank) + " published as its " + what +
                    " cannot be read: it runs another build of muster, or something else wrote "
                    "into the job's store",
                {rank});
}

}  // namespace

Status describe_this_process(PeerAddress& contact) {
  contact.boot_id = boot_id();
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) == 0) contact.host_name = name.data();
  contact.network_namespace = namespace_inode("net");
  contact.user_namespace = namespace_inode("user");
  contact.pid_namespace = namespace_inode("pid");
  contact.time_namespace = namespace_inode("time");
  contact.user = ::geteuid();
  contact.pid = static_cast<std::uint32_t>(::getpid());
  const auto start = process_start(contact.pid);
  if (!start)
    return Status(Code::exhausted,
                  "this process cannot look at itself in /proc: " + errno_text(errno));
  contact.start_time = *start;
  contact.cores = bits_of(own_cores());
  contact.quota = cpu_quota();
  if (contact.boot_id.empty() || contact.start_time == 0) {
    return Status(Code::unsupported,
                  "this process cannot tell which machine it is on: /proc is not mounted (or hides "
                  "/proc/sys/kernel/random/boot_id)");
  }
  return {};
}

std::string encode(const PeerAddress& contact) {
  ByteWriter out;
  out.put(kContactVersion)
      .put_text(contact.boot_id)
      .put_text(contact.host_name)
      .put_text(contact.host_label);
  out.put(contact.network_namespace).put(contact.user_namespace).put(contact.user);
  out.put(contact.pid_namespace)
      .put(contact.time_namespace)
      .put(contact.pid)
      .put(contact.start_time)
      .put_text(contact.cores)
      .put(contact.quota);
  out.put(contact.secret_kind)
      .put(static_cast<std::uint8_t>(contact.shared_memory))
      .put(contact.nonce)
      .put_text(contact.local_name);
  out.put(static_cast<std::uint32_t>(contact.addresses.size()));
  for (const SocketAddress& address : contact.addresses)
    out.put_text(address.host()).put(address.port());
  return out.take();
}

Result<PeerAddress> decode_peer_address(std::string_view text, int rank) {
  ByteReader in(text);
  PeerAddress contact;
  if (in.get<std::uint8_t>() != kContactVersion) return malformed("contact", rank);
  contact.boot_id = in.get_text();
  contact.host_name = in.get_text();
  contact.host_label = in.get_text();
  contact.network_namespace = in.get<std::uint64_t>();
  contact.user_namespace = in.get<std::uint64_t>();
  contact.user = in.get<std::uint32_t>();
  contact.pid_namespace = in.get<std::uint64_t>();
  contact.time_namespace = in.get<std::uint64_t>();
  contact.pid = in.get<std::uint32_t>();
  contact.start_time = in.get<std::uint64_t>();
  contact.cores = in.get_text();
  contact.quota = in.get<double>();
  contact.secret_kind = in.get<Secret::Kind>();
  contact.shared_memory = in.get<std::uint8_t>() != 0;
  contact.nonce = in.get<std::uint64_t>();
  contact.local_name = in.get_text();
  const auto count = in.get<std::uint32_t>();
  if (!in.ok() || count > kMostAddresses || contact.local_name.size() > 100)
    return malformed("contact", rank);
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::string host(in.get_text());
    const auto port = in.get<std::uint16_t>();
    if (!in.ok()) return malformed("contact", rank);
    auto address = SocketAddress::numeric(host, port);
    if (!address || port == 0) return malformed("contact", rank);
    contact.addresses.push_back(*address);
  }
  if (!in.at_end()) return malformed("contact", rank);
  return contact;
}

int cores_together(std::span<const PeerAddress* const> contacts) {
  std::string all;
  double quota = 0;
  for (const PeerAddress* contact : contacts) {
    if (contact->quota > 0 && (quota == 0 || contact->quota < quota)) quota = contact->quota;
    all.resize(std::max(all.size(), contact->cores.size()));
    for (std::size_t i = 0; i < contact->cores.size(); ++i)
      all[i] = static_cast<char>(all[i] | contact->cores[i]);
  }
  int cores = 0;
  for (const char byte : all) cores += std::popcount(static_cast<unsigned char>(byte));
  return cores_within(static_cast<std::size_t>(cores), quota);
}

bool could_share_memory(const PeerAddress& a, const PeerAddress& b) {
  return a.shared_memory && b.shared_memory && same_network_stack(a, b) &&
         a.user_namespace == b.user_namespace && a.user == b.user;
}

bool same_network_stack(const PeerAddress& a, const PeerAddress& b) {
  return a.boot_id == b.boot_id && a.host_label == b.host_label &&
         a.network_namespace == b.network_namespace;
}

bool same_pids(const PeerAddress& a, const PeerAddress& b) {
  return a.boot_id == b.boot_id && a.pid_namespace == b.pid_namespace &&
         a.time_namespace == b.time_namespace;
}

bool same_process(const PeerAddress& a, const PeerAddress& b) {
  return same_pids(a, b) && a.pid == b.pid && a.start_time == b.start_time;
}

std::string name_of(int rank, const PeerAddress& contact) {
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(contact.pid) + " on " +
         contact.host_name +
         (contact.host_label.empty() ? "" : ", labelled " + contact.host_label) + ")";
}

std::string encode(const MeetingVerdict& verdict) {
  ByteWriter out;
  out.put(kContactVersion)
      .put(static_cast<std::uint8_t>(verdict.mapped))
      .put(verdict.maker)
      .put(verdict.nonce)
      .put_text(verdict.reason);
  return out.take();
}

Result<MeetingVerdict> decode_verdict(std::string_view text, int rank) {
  ByteReader in(text);
  MeetingVerdict verdict;
  if (in.get<std::uint8_t>() != kContactVersion) return malformed("verdict", rank);
  verdict.mapped = in.get<std::uint8_t>() != 0;
  verdict.maker = in.get<std::int32_t>();
  verdict.nonce = in.get<std::uint64_t>();
  verdict.reason = in.get_text();
  if (!in.at_end()) return malformed("verdict", rank);
  return verdict;
}

}  // namespace muster::transport
