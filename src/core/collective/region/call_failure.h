/// How a member's call fails: the error text, the ranks that it names, the notice to peers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/base/time/task.h"
#include "core/collective/communicator.h"
#include "core/shm/group_peers.h"
#include "core/shm/group_segment.h"
#include "core/transport/channel/channel.h"
#include "muster/status.h"

namespace muster::collective::region {

inline int job_rank(const transport::Channel& channel, int member) {
  return channel.members()[static_cast<std::size_t>(member)];
}
/// "rank 3".
std::string rank_text(const transport::Channel& channel, int member);

class CallFailure {
 public:
  CallFailure(shm::GroupSegment& segment, shm::GroupPeers& peers, transport::Channel& channel)
      : segment_(segment), peers_(peers), channel_(channel) {}

  /// "all_reduce number 12".
  std::string call_text(const Args& args) const;

  /// Fails the channel; returns its first cause.
  Status refuse(Status cause);
  /// The same, but first waits for a better cause. If a peer cannot be reached, it may be dead; if
  /// a peer has aborted, its cause follows. The call's deadline bounds the wait.
  Task<Status> fail_after_grace(Status cause);
  /// Publishes that this member's call fails. Peers that have read its memory must not trust the
  /// data, and peers that store into it must stop.
  void abort();
  /// Waits for the cause after a peer has aborted.
  Task<Status> cause();

  Status differing_sizes(const Args& args, int member, std::uint64_t theirs, std::uint64_t mine);
  Status unexpected_size(const Args& args, int member, std::uint64_t given, std::uint64_t expected);
  Status cannot_map(int member, std::uint64_t bytes) const;
  Status cannot_read(int member, std::uint64_t bytes) const;
  /// For a cause without a text of its own, such as an exception on this member in the call of
  /// `args`.
  Status failed_here(const Args& args, const Status& cause);

 private:
  std::string text(int member) const { return rank_text(channel_, member); }

  shm::GroupSegment& segment_;
  shm::GroupPeers& peers_;
  transport::Channel& channel_;
};

}  // namespace muster::collective::region
