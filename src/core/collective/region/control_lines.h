// SPDX-License-Identifier: BSD-3-Clause
/// One member's control lines: publishes one per call, polls the peers' lines and compares their
/// calls with its own.
///
/// A member may run ahead. If a call reads nothing from a peer, that peer's line is polled later,
/// at the latest before the ring of lines wraps around (`has_room`).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/shm/group_peers.h"
#include "core/shm/group_segment.h"
#include "core/transport/channel/channel.h"
#include "core/transport/channel/fingerprint.h"

namespace muster::collective::region {

class ControlLines {
 public:
  ControlLines(shm::GroupSegment& segment, shm::GroupPeers& peers, transport::Channel& channel);
  ControlLines(const ControlLines&) = delete;
  ControlLines& operator=(const ControlLines&) = delete;

  /// Whether the line of the current call may be written: every peer has finished with its old
  /// contents, and this member has finished with the peers' lines of that old call.
  bool has_room() {
    return segment_.sequence() <= known_by_all_ + segment_.layout().slots || update_room();
  }
  /// Publishes this member's line. Its data and locations must have been written.
  void publish(const transport::Fingerprint& call);

  /// Polls `member`'s lines up to `limit`. Returns true once that line has been seen and all calls
  /// agree. The data of the current call must still be read; this member's next line tells the peer
  /// that it was.
  bool poll(int member, std::uint64_t limit) {
    std::uint64_t& next = next_[static_cast<std::size_t>(member)];
    while (next <= limit) {
      if (!poll_line(member, next)) return false;
      ++next;
    }
    return true;
  }
  bool poll(int member) { return poll(member, segment_.sequence()); }
  bool poll_all(std::uint64_t limit);

  /// False once two members have made different calls. No line can be trusted then.
  bool agreed() const { return agreed_; }
  /// The latest call of a member that this one has seen.
  const transport::Fingerprint& heard(int member) const {
    return heard_[static_cast<std::size_t>(member)];
  }
  /// Whether this member must wait for `member` before it may write the line of the current call.
  bool lacks_room_from(int member) const {
    const auto index = static_cast<std::size_t>(member);
    return std::min(known_seen_[index], next_[index] - 1) + segment_.layout().slots <
           segment_.sequence();
  }
  /// For tests: as if all members had made the calls up to `sequence`.
  void count_from(std::uint64_t sequence);

 private:
  bool poll_line(int member, std::uint64_t sequence) {
    const shm::Line& theirs = segment_.line(member, sequence);
    if (theirs.sequence.load(std::memory_order_acquire) != sequence ||
        !compare(member, theirs, sequence))
      return false;
    std::uint64_t& seen = known_seen_[static_cast<std::size_t>(member)];
    seen = std::max(seen, theirs.seen);
    return true;
  }
  bool update_room();
  bool compare(int member, const shm::Line& line, std::uint64_t sequence);
  bool compare_by_rules(int member, const transport::Fingerprint& theirs,
                        const transport::Fingerprint& mine);

  shm::GroupSegment& segment_;
  shm::GroupPeers& peers_;
  transport::Channel& channel_;
  std::vector<std::uint64_t> next_;            // per member: the next line to poll
  std::vector<std::uint64_t> known_seen_;      // per member: what it is known to have seen
  std::vector<transport::Fingerprint> heard_;  // per member: its latest call seen here
  std::uint64_t known_by_all_ = 0;  // up to here all members have seen each other's calls
  std::array<transport::Fingerprint, fixed::kRegionSlots> calls_{};  // this member's
  bool agreed_ = true;
};

}  // namespace muster::collective::region
