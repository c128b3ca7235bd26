// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/region/control_lines.h"

#include <cstring>
#include <string>

#include "core/base/bytes.h"
#include "core/collective/op.h"
#include "core/collective/region/call_failure.h"

namespace muster::collective::region {
namespace {

using shm::Line;
using transport::Fingerprint;

// A line holds the fields of a fingerprint in the same order. They are copied in 8-byte words,
// because a load wider than the preceding stores cannot be forwarded from the store buffer.
constexpr std::size_t kKind = offsetof(Fingerprint, op), kLineKind = offsetof(Line, op);
constexpr std::size_t kKindBytes = sizeof(Fingerprint) - kKind;
static_assert(offsetof(Line, dtype) - kLineKind == offsetof(Fingerprint, dtype) - kKind &&
              offsetof(Line, reduce) - kLineKind == offsetof(Fingerprint, reduce) - kKind &&
              offsetof(Line, flags) - kLineKind == offsetof(Fingerprint, flags) - kKind &&
              offsetof(Line, root) - kLineKind == offsetof(Fingerprint, root) - kKind &&
              offsetof(Line, count) - kLineKind == offsetof(Fingerprint, count) - kKind &&
              offsetof(Line, digest) - kLineKind == offsetof(Fingerprint, digest) - kKind);

template <class T>
const std::byte* bytes_at(const T& object, std::size_t at) {
  return reinterpret_cast<const std::byte*>(&object) + at;
}
template <class T>
std::byte* bytes_at(T& object, std::size_t at) {
  return reinterpret_cast<std::byte*>(&object) + at;
}

}  // namespace

ControlLines::ControlLines(shm::GroupSegment& segment, shm::GroupPeers& peers,
                           transport::Channel& channel)
    : segment_(segment),
      peers_(peers),
      channel_(channel),
      next_(segment.layout().members, 1),
      known_seen_(segment.layout().members, 0),
      heard_(segment.layout().members) {}

bool ControlLines::update_room() {
  const std::uint64_t sequence = segment_.sequence(), slots = segment_.layout().slots;
  poll_all(sequence - 1);
  std::uint64_t by_all = sequence;
  std::uint64_t seen_of_all = sequence - 1;
  for (int member = 0; member < segment_.size(); ++member) {
    if (member == segment_.rank()) continue;
    const auto index = static_cast<std::size_t>(member);
    std::uint64_t& known = known_seen_[index];
    if (known + slots < sequence)
      known = std::max(known, segment_.progress(member).seen.load(std::memory_order_acquire));
    // A peer that has published its line of this call has already found this room.
    if (known + slots < sequence && segment_.has_begun(member)) known = sequence - slots;
    seen_of_all = std::min(seen_of_all, next_[index] - 1);
    by_all = std::min({by_all, known, next_[index] - 1});
  }
  known_by_all_ = std::max(known_by_all_, by_all);
  if (sequence <= known_by_all_ + slots) return true;
  // The peers may be waiting for this member in the same way.
  std::atomic<std::uint64_t>& seen = segment_.progress(segment_.rank()).seen;
  if (seen.load(std::memory_order_relaxed) < seen_of_all) {
    seen.store(seen_of_all, std::memory_order_release);
    peers_.wake();
  }
  return false;
}

void ControlLines::publish(const Fingerprint& call) {
  const std::uint64_t sequence = segment_.sequence();
  copy_words(calls_[sequence % fixed::kRegionSlots], call);
  // Reading a line takes it from its writer's cache. Lines of peers that this member does not read
  // from are therefore polled in batches, often enough that no peer has to wait.
  std::uint64_t seen = sequence - 1;
  for (int member = 0; member < segment_.size(); ++member) {
    if (member == segment_.rank()) continue;
    const std::uint64_t& next = next_[static_cast<std::size_t>(member)];
    if (next + segment_.layout().slots / 8 <= sequence) poll(member, sequence - 1);
    seen = std::min(seen, next - 1);
  }
  // The line's owner alone writes it, and only once every member has seen its old contents. The
  // release of `sequence` pairs with the acquire in `poll_line`: a peer that sees the number sees
  // the line, and all data that was staged before.
  Line& mine = segment_.my_line();
  mine.seen = seen;
  muster::copy_words<kKindBytes / 8>(bytes_at(mine, kLineKind), bytes_at(call, kKind));
  mine.sequence.store(sequence, std::memory_order_release);
  peers_.wake();
}

bool ControlLines::poll_all(std::uint64_t limit) {
  bool all = true;
  for (int member = 0; member < segment_.size(); ++member) {
    if (member != segment_.rank()) all = poll(member, limit) && all;
  }
  return all;
}

// After the first mismatch nothing is compared any more.
bool ControlLines::compare(int member, const Line& line, std::uint64_t sequence) {
  if (!agreed_) return false;
  Fingerprint& theirs = heard_[static_cast<std::size_t>(member)];
  theirs.sequence = sequence;
  std::memcpy(bytes_at(theirs, kKind), bytes_at(line, kLineKind), kKindBytes);
  const Fingerprint& mine = calls_[sequence % fixed::kRegionSlots];
  if (std::memcmp(bytes_at(line, kLineKind), bytes_at(mine, kKind), kKindBytes) == 0) [[likely]]
    return true;
  return compare_by_rules(member, theirs, mine);
}

bool ControlLines::compare_by_rules(int member, const Fingerprint& theirs,
                                    const Fingerprint& mine) {
  if (fingerprint_rules().agree(theirs, mine)) return true;
  agreed_ = false;
  channel_.begin(mine);  // an inline call has not set the channel's current call
  channel_.compare(member, theirs);
  if (channel_.failed()) return false;
  // The channel had already moved on from that call.
  const int rank = segment_.rank();
  channel_.fail(Status(
      Code::mismatch,
      "members call different operations under number " + std::to_string(mine.sequence) + ": " +
          rank_text(channel_, rank) + " calls " + fingerprint_rules().describe(mine) + ", " +
          rank_text(channel_, member) + " calls " + fingerprint_rules().describe(theirs) +
          "; every member must make the same calls in the same order",
      {job_rank(channel_, rank), job_rank(channel_, member)}));
  return false;
}

void ControlLines::count_from(std::uint64_t sequence) {
  known_by_all_ = sequence;
  std::ranges::fill(next_, sequence + 1);
  std::ranges::fill(known_seen_, sequence);
}

}  // namespace muster::collective::region
