/// One member's control lines: it publishes one for each call, looks at its peers' and compares
/// their calls with its own.
///
/// A member may run ahead. If a call reads nothing from a peer, that peer's line is looked at
/// later, at the latest before the ring of lines comes round (`has_room`).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "muster/shm/group_peers.h"
#include "muster/shm/group_segment.h"
#include "muster/transport/channel.h"
#include "muster/transport/fingerprint.h"

namespace muster::collective::region {

class ControlLines {
 public:
  ControlLines(shm::GroupSegment& segment, shm::GroupPeers& peers, transport::Channel& channel);
  ControlLines(const ControlLines&) = delete;
  ControlLines& operator=(const ControlLines&) = delete;

  /// Whether the line of the call under way may be written: every peer has finished with the one
  /// that stands there, and this member with theirs of that call.
  bool has_room() {
    return segment_.sequence() <= known_by_all_ + segment_.layout().slots || finds_room();
  }
  /// Publishes this member's line, whose data and locations have been written.
  void publish(const transport::Fingerprint& call);

  /// Looks at `member`'s lines up to `limit`; true once it has seen that one, and all agree. The
  /// data of the call under way still has to be read: the member learns that it was from this
  /// member's next line.
  bool see(int member, std::uint64_t limit) {
    std::uint64_t& next = next_[static_cast<std::size_t>(member)];
    while (next <= limit) {
      if (!look(member, next)) return false;
      ++next;
    }
    return true;
  }
  bool see(int member) { return see(member, segment_.sequence()); }
  bool see_all(std::uint64_t limit);

  /// False once two members have made different calls: nothing can be read any more.
  bool agreed() const { return agreed_; }
  /// The latest call of a member that this one has looked at.
  const transport::Fingerprint& heard(int member) const {
    return heard_[static_cast<std::size_t>(member)];
  }
  /// Whether this member waits for `member` before it may write the line of the call under way.
  bool lacks_room_of(int member) const {
    const auto index = static_cast<std::size_t>(member);
    return std::min(known_seen_[index], next_[index] - 1) + segment_.layout().slots <
           segment_.sequence();
  }
  /// As if all members had made the calls up to `sequence`.
  void count_from(std::uint64_t sequence);

 private:
  bool look(int member, std::uint64_t sequence) {
    const shm::Line& theirs = segment_.line(member, sequence);
    if (theirs.sequence.load(std::memory_order_acquire) != sequence ||
        !compare(member, theirs, sequence))
      return false;
    std::uint64_t& seen = known_seen_[static_cast<std::size_t>(member)];
    seen = std::max(seen, theirs.seen);
    return true;
  }
  bool finds_room();
  bool compare(int member, const shm::Line& line, std::uint64_t sequence);
  bool compare_by_rules(int member, const transport::Fingerprint& theirs,
                        const transport::Fingerprint& mine);

  shm::GroupSegment& segment_;
  shm::GroupPeers& peers_;
  transport::Channel& channel_;
  std::vector<std::uint64_t> next_;            // the next line to look at, of each member
  std::vector<std::uint64_t> known_seen_;      // what each member is known to have seen
  std::vector<transport::Fingerprint> heard_;  // the latest call seen of each member
  std::uint64_t known_by_all_ = 0;  // all members have seen these calls, and this one theirs
  std::array<transport::Fingerprint, fixed::kRegionSlots>
      calls_{};  // this member's, to compare with
  bool agreed_ = true;
};

}  // namespace muster::collective::region
