// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/peer_address.h"

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

constexpr std::uint32_t kMostAddresses = 64;  // limit: of a record

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
  // The calling thread's namespaces decide what its sockets can reach.
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

Result<PeerBook> PeerBook::decode(std::span<const std::string> contacts, int rank, int world_size) {
  if (contacts.size() != static_cast<std::size_t>(world_size)) {
    return Status(
        Code::invalid_argument,
        std::to_string(contacts.size()) + " contacts for a world of " + std::to_string(world_size));
  }
  std::vector<PeerAddress> decoded;
  for (int each = 0; each < world_size; ++each) {
    auto contact = decode_peer_address(contacts[static_cast<std::size_t>(each)], each);
    if (!contact) return contact.status();
    decoded.push_back(std::move(*contact));
  }
  return PeerBook(rank, std::move(decoded));
}

Status PeerBook::check_reachable(int rank, Secret::Kind secret) const {
  const PeerAddress& other = of(rank);
  // A differing label (set by a test) does not make the host another one.
  if (mine().boot_id == other.boot_id && mine().network_namespace == other.network_namespace) {
    if (mine().user == other.user || secret != Secret::Kind::host) return {};
    return Status(Code::refused,
                  name_of(rank, other) +
                      " is run by another user; without a secret only ranks of one user may meet: "
                      "set the same MUSTER_SECRET for "
                      "all ranks",
                  {rank});
  }
  if (secret == Secret::Kind::host || other.secret_kind == Secret::Kind::host) {
    return Status(Code::refused,
                  name_of(rank, other) +
                      " runs on another host (or in another network namespace) than " +
                      name_of(rank_, mine()) +
                      ", and this job has no secret: set MUSTER_SECRET to the same text of at "
                      "least 16 characters for all ranks (or say "
                      "MUSTER_INSECURE=1 where the network is trusted)",
                  {rank});
  }
  const bool only_loopback = std::all_of(other.addresses.begin(), other.addresses.end(),
                                         [](const auto& each) { return each.is_loopback(); });
  if (!only_loopback) return {};
  return Status(Code::network,
                name_of(rank, other) + " listens on a loopback address only, which " +
                    name_of(rank_, mine()) +
                    " on another host cannot reach: give MASTER_ADDR a name or address that all "
                    "hosts can reach, or name the interface in "
                    "MUSTER_SOCKET_IFNAME",
                {rank});
}

Status PeerBook::check(Secret::Kind secret) const {
  for (int rank = 0; rank < world_size(); ++rank) {
    const PeerAddress& other = of(rank);
    if (other.addresses.size() != of(0).addresses.size() || other.addresses.empty()) {
      return Status(Code::invalid_argument,
                    "the lists of network interfaces differ in length: " + name(rank) +
                        " listens on " + std::to_string(other.addresses.size()) + ", " + name(0) +
                        " on " + std::to_string(of(0).addresses.size()) +
                        "; MUSTER_SOCKET_IFNAME must name equally many on every rank",
                    {rank});
    }
    if (rank == rank_) continue;
    if (Status reachable = check_reachable(rank, secret); !reachable) return reachable;
  }
  return {};
}

std::vector<int> PeerBook::candidates() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (could_share_memory(mine(), of(rank))) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<int> PeerBook::hosts(const std::vector<MeetingVerdict>& verdicts) const {
  const auto on_one_host = [&](std::size_t a, std::size_t b) {
    if (verdicts[a].mapped && verdicts[b].mapped)
      return verdicts[a].maker == verdicts[b].maker && verdicts[a].nonce == verdicts[b].nonce;
    if (verdicts[a].mapped != verdicts[b].mapped || could_share_memory(contacts_[a], contacts_[b]))
      return false;
    return same_network_stack(contacts_[a], contacts_[b]);
  };
  std::vector<int> hosts(verdicts.size(), -1);
  int next = 0;
  for (std::size_t rank = 0; rank < verdicts.size(); ++rank) {
    for (std::size_t earlier = 0; earlier < rank && hosts[rank] < 0; ++earlier) {
      if (on_one_host(rank, earlier)) hosts[rank] = hosts[earlier];
    }
    if (hosts[rank] < 0) hosts[rank] = next++;
  }
  return hosts;
}

/// Ranks that are bound to different cores have the union of them.
int PeerBook::cores(const std::vector<int>& hosts) const {
  std::vector<const PeerAddress*> here;
  for (std::size_t each = 0; each < hosts.size(); ++each) {
    if (hosts[each] == hosts[static_cast<std::size_t>(rank_)]) here.push_back(&contacts_[each]);
  }
  return cores_together(here);
}

}  // namespace muster::transport
