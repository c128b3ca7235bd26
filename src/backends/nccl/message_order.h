// SPDX-License-Identifier: BSD-3-Clause
/// The order in which the messages of one device reach NCCL: the same on all ranks, so that kernels
/// which wait for their peers never wait for each other in a circle, however few of them fit on a
/// device (https://github.com/NVIDIA/nccl/issues/783).
///
/// A rank posts a message when it is ready on its device (device_messages.h says why). Those that
/// sender and receiver have both posted, in both directions, make up a round, which becomes one
/// group of NCCL. Rounds are ordered by Skeen's algorithm (Birman and Joseph, "Reliable
/// communication in the presence of failures", 1987), in which each multicast has two destinations
/// here: the lower rank of the pair proposes a time from its logical clock, the higher one settles
/// on one that is no earlier than its own clock and tells the lower one. A rank launches the round
/// with the least time as soon as that time is settled. A message that its peer never posts holds
/// up no other.
///
/// No I/O and no threads here: the caller carries the notes, in order for each pair.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace muster::nccl {

/// Travels between the two ranks of a pair.
struct MessageNote {
  enum class NoteStage : std::uint32_t {
    posted,    ///< to the lower rank: so many more messages
    proposed,  ///< to the higher rank: a round, as counts of its own messages, and its time
    settled,   ///< to the lower rank: the time of its first round that had none
    ended,     ///< nothing more is posted; not for `MessageOrder`
  };
  NoteStage kind = NoteStage::posted;
  std::uint32_t sends = 0, receives = 0;
  std::uint32_t reserved = 0;  ///< instead of padding, which would travel as it is
  std::uint64_t time = 0;
};
static_assert(std::has_unique_object_representations_v<MessageNote>);

/// At most so many messages of one direction may be posted that are in no round yet.
inline constexpr std::uint32_t kMostPosted = 1 << 20;  // limit: memory that a peer can ask for

/// Both ends of a message must say this alike. Those of the sends, and then of the receives, follow
/// a `posted` note.
struct MessageSize {
  std::uint64_t bytes = 0;
  std::uint64_t dtype = 0;  ///< DType
  bool operator==(const MessageSize&) const = default;
};
static_assert(std::has_unique_object_representations_v<MessageSize>);

/// Two ranks that exchange messages. Equal on both, and of no other pair in the job.
struct MessagePair {
  std::uint32_t group = 0;
  int low = 0, high = 0;
  auto operator<=>(const MessagePair&) const = default;
};

/// The next `sends` and `receives` that this rank has posted for the pair, to be launched as one.
struct MessageRound {
  MessagePair pair;
  std::uint32_t sends = 0, receives = 0;
};

/// One rank's part of the order, for all its pairs on a device. Not thread-safe.
class MessageOrder {
 public:
  /// The consequences of an event: notes for the other rank of the pair, rounds whose messages both
  /// ranks have posted, and rounds to launch, in this order and after those of earlier events.
  struct MessageSteps {
    std::vector<std::pair<MessagePair, MessageNote>> notes = {};
    std::vector<MessageRound> met = {};
    std::vector<MessageRound> rounds = {};
  };

  /// This rank posts messages. `leads`: it is the lower rank of the pair.
  MessageSteps post(const MessagePair& pair, bool leads, std::uint32_t sends,
                    std::uint32_t receives);
  /// Why a note of the pair's other rank cannot be true; empty: it can.
  std::string why_refused(const MessagePair& pair, bool leads, const MessageNote& note) const;
  /// Such a note has come, which is not refused.
  MessageSteps receive(const MessagePair& pair, const MessageNote& note);
  /// The pair's group has ended or failed: it holds up no round of other pairs any more.
  MessageSteps drop(std::uint32_t group);

 private:
  /// Messages posted that are in no round yet.
  struct PostedCounts {
    std::uint32_t sends = 0, receives = 0;
  };
  struct PairPosts {
    PostedCounts mine, theirs;  // `theirs` is counted by the lower rank alone
    std::uint64_t rounds = 0;   // so far; the same on both ranks
  };
  /// A round's time, or the least that it can be, and what tells it from others of that time: first
  /// a number that is mixed from its pair. If pairs were ordered by their ranks, a ring would run
  /// one pair after another; so it runs in as many steps as neighbours have falling numbers.
  using RoundKey = std::tuple<std::uint64_t, std::uint64_t, MessagePair, std::uint64_t>;
  static RoundKey key_of(std::uint64_t time, const MessagePair& pair, std::uint64_t number);
  struct RoundState {
    MessageRound round;
    bool settled = false;
  };

  void propose_ready(const MessagePair& pair, MessageSteps& steps);
  void launch_settled(MessageSteps& steps);

  std::uint64_t clock_ = 0;
  std::map<MessagePair, PairPosts> posts_;
  std::map<RoundKey, RoundState> rounds_;               // not launched
  std::map<MessagePair, std::vector<RoundKey>> asked_;  // proposed by this rank, not settled
};

}  // namespace muster::nccl
