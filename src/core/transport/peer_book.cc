#include "core/transport/peer_book.h"

#include <algorithm>

namespace muster::transport {

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
