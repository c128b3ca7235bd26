// SPDX-License-Identifier: BSD-3-Clause
/// How a member's call fails, and how it waits until peers have stopped writing to its buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/base/bytes.h"
#include "core/base/time/task.h"
#include "core/collective/communicator.h"
#include "core/shm/arena/arena.h"
#include "core/shm/group_peers.h"
#include "core/shm/group_segment.h"
#include "core/transport/channel/channel.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::collective::region {

inline int job_rank(const transport::Channel& channel, int member) {
  return channel.members()[static_cast<std::size_t>(member)];
}
/// "rank 3".
std::string rank_text(const transport::Channel& channel, int member);

/// How a member's call fails: the error text, the ranks that it names, the notice to peers.
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

/// After a failure, a member waits this long for each sign of progress from peers that may be
/// storing into its output or reading its input. They make progress with every window.
inline constexpr Duration kQuiesceLimit = std::chrono::milliseconds(50);  // limit: patience

/// Returns the arena that peers can map: the process's own, or another one in tests.
using ArenaOf = shm::Arena* (*)();

/// Tracks the caller's buffers that peers may be writing to in the current call, and waits after a
/// failure until the peers have stopped.
class Quiescence {
 public:
  Quiescence(shm::GroupSegment& segment, shm::GroupPeers& peers, transport::Channel& channel,
             ArenaOf arena)
      : segment_(segment), peers_(peers), channel_(channel), arena_(arena) {}

  void begin_call() { exposed_ = Exposed::nothing; }
  /// Peers may store into this member's output from now on.
  void expose_output() { exposed_ = Exposed::output; }
  /// Peers may reclaim the lines of the inputs that this member's table grants to them.
  void expose_inputs() { exposed_ = Exposed::inputs; }

  /// Waits for peers that have begun the call to finish with this member's memory, until all
  /// counters (or that of `only`) have reached the call's end. Gives up when they stop making
  /// progress.
  Task<> quiesce(shm::Counter done, int only = -1);
  /// The same for the exposed memory.
  Task<> quiesce_exposed();
  /// Call after a failure that this member has published. Keeps exposed memory out of use as long
  /// as a peer may store into it: a peer that was stopped in the middle of a store finishes it when
  /// it continues.
  void quarantine(const Args& args) noexcept;
  /// Whether memory is in quarantine, which ends by what peers store in the segment.
  bool watches_writers() const { return watches_writers_; }

 private:
  enum class Exposed : std::uint8_t { nothing, output, inputs };

  bool quiesced(shm::Counter done, int only) const;
  void quarantine(ConstBytes memory, shm::Counter done, int only);

  shm::GroupSegment& segment_;
  shm::GroupPeers& peers_;
  transport::Channel& channel_;
  const ArenaOf arena_;
  Exposed exposed_ = Exposed::nothing;
  bool watches_writers_ = false;
};

}  // namespace muster::collective::region
