/// What all ranks have published of themselves, and what follows from it: who can be reached, who
/// may share memory, who is on one host. Values only, no I/O. Private to `transport/`.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/security/secret.h"
#include "core/transport/peer_address.h"
#include "muster/status.h"

namespace muster::transport {

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
