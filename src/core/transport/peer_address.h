// SPDX-License-Identifier: BSD-3-Clause
/// The record that a rank publishes so that the others can locate and reach it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/net/socket_address.h"
#include "core/security/secret.h"
#include "muster/status.h"

namespace muster::transport {

/// Raised with every change of the bytes of addresses or verdicts.
inline constexpr std::uint8_t kContactVersion = 5;  // limit: a version

struct PeerAddress {
  // The machine: ranks with another boot id, network or user namespace, user or label cannot share
  // memory by way of our Unix socket.
  std::string boot_id;
  std::string host_name;  ///< for messages only
  std::string host_label;
  std::uint64_t network_namespace = 0;
  std::uint64_t user_namespace = 0;
  std::uint32_t user = 0;
  // The process. A pid is meaningful only within its namespace, and, because pids are reused, only
  // together with the start time, which differs between time namespaces.
  std::uint64_t pid_namespace = 0;
  std::uint64_t time_namespace = 0;
  std::uint32_t pid = 0;
  std::uint64_t start_time = 0;  ///< `process_start`
  std::string cores;             ///< a bit for each of its `own_cores`
  double quota = 0;              ///< `cpu_quota`

  Secret::Kind secret_kind = Secret::Kind::host;
  bool shared_memory = true;
  std::uint64_t nonce = 0;  ///< distinguishes this process from an earlier one of the same rank
  std::string local_name;   ///< of its abstract Unix socket
  std::vector<SocketAddress> addresses;  ///< where its links listen, one for each interface used
};

/// Machine and process of the caller; the rest is left as it is.
Status describe_this_process(PeerAddress& contact);
std::string encode(const PeerAddress& contact);
/// `rank` published it: named in the error where it is malformed.
Result<PeerAddress> decode_peer_address(std::string_view text, int rank);

/// How many cores these processes have together, cut by the least of their quotas (`cores_within`),
/// as of ranks of one control group.
int cores_together(std::span<const PeerAddress* const> contacts);
/// Whether the two could meet at an abstract Unix socket of one machine and trust each other there.
bool could_share_memory(const PeerAddress& a, const PeerAddress& b);
/// One running kernel and one network namespace: loopback addresses of one reach the other.
bool same_network_stack(const PeerAddress& a, const PeerAddress& b);
/// The pid of the one means that process to the other too.
bool same_pids(const PeerAddress& a, const PeerAddress& b);
/// The same process (ranks as threads).
bool same_process(const PeerAddress& a, const PeerAddress& b);
/// "rank 3 (pid 1234 on node7)".
std::string name_of(int rank, const PeerAddress& contact);

/// A rank's word after meeting: which region it has mapped.
struct MeetingVerdict {
  bool mapped = false;
  std::int32_t maker = -1;
  std::uint64_t nonce = 0;
  std::string reason;  ///< where none is mapped: why
};
std::string encode(const MeetingVerdict& verdict);
Result<MeetingVerdict> decode_verdict(std::string_view text, int rank);

/// The records of all ranks, and what follows from them: which ranks can be reached, which may
/// share memory, which are on one host. Values only, no I/O.
class PeerBook {
 public:
  PeerBook() = default;
  /// Reads what the exchange has brought, in rank order.
  static Result<PeerBook> decode(std::span<const std::string> contacts, int rank, int world_size);

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(contacts_.size()); }
  const PeerAddress& mine() const { return of(rank_); }
  const PeerAddress& of(int rank) const { return contacts_[static_cast<std::size_t>(rank)]; }
  /// "rank 3 (pid 1234 on node7)".
  std::string name(int rank) const { return name_of(rank, of(rank)); }

  /// Whether every rank can be reached from here at all, in time to say so in plain words.
  Status check(Secret::Kind secret) const;
  /// Ranks that may share memory with this one, itself included.
  std::vector<int> candidates() const;
  /// The host of each rank, from 0 in the order of the first rank on each; the same on all ranks.
  std::vector<int> hosts(const std::vector<MeetingVerdict>& verdicts) const;
  /// How many cores the ranks of this rank's host have together.
  int cores(const std::vector<int>& hosts) const;
  /// Whether the pid of `rank` means another process here.
  bool is_process_here(int rank) const {
    return same_pids(mine(), of(rank)) && !same_process(mine(), of(rank));
  }

 private:
  PeerBook(int rank, std::vector<PeerAddress> contacts)
      : rank_(rank), contacts_(std::move(contacts)) {}
  Status check_reachable(int rank, Secret::Kind secret) const;

  int rank_ = 0;
  std::vector<PeerAddress> contacts_;
};

}  // namespace muster::transport
