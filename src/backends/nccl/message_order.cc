// SPDX-License-Identifier: BSD-3-Clause
#include "backends/nccl/message_order.h"

#include <algorithm>

namespace muster::nccl {
namespace {

/// No clock gets there: a round would have to be launched every nanosecond for a century.
constexpr std::uint64_t kNoTime = std::uint64_t{1} << 62;

/// The finalizer of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", 2014). The same on all ranks.
std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

using NoteStage = MessageNote::NoteStage;

MessageOrder::MessageSteps MessageOrder::post(const MessagePair& pair, bool leads,
                                              std::uint32_t sends, std::uint32_t receives) {
  MessageSteps steps;
  auto& mine = posts_[pair].mine;
  mine.sends += sends;
  mine.receives += receives;
  if (leads)
    propose_ready(pair, steps);
  else
    steps.notes.emplace_back(
        pair, MessageNote{.kind = NoteStage::posted, .sends = sends, .receives = receives});
  return steps;
}

MessageOrder::RoundKey MessageOrder::key_of(std::uint64_t time, const MessagePair& pair,
                                            std::uint64_t number) {
  const auto ranks = static_cast<std::uint64_t>(pair.low) << 32 | static_cast<unsigned>(pair.high);
  return {time, mixed(mixed(ranks) ^ pair.group), pair, number};
}

void MessageOrder::propose_ready(const MessagePair& pair, MessageSteps& steps) {
  auto& [mine, theirs, number] = posts_[pair];
  const MessageRound round{pair, std::min(mine.sends, theirs.receives),
                           std::min(mine.receives, theirs.sends)};
  if (round.sends == 0 && round.receives == 0) return;
  mine.sends -= round.sends;
  theirs.receives -= round.sends;
  mine.receives -= round.receives;
  theirs.sends -= round.receives;
  const auto key = key_of(++clock_, pair, ++number);
  rounds_[key] = RoundState{.round = round};
  asked_[pair].push_back(key);
  steps.met.push_back(round);
  steps.notes.emplace_back(pair, MessageNote{.kind = NoteStage::proposed,
                                             .sends = round.receives,
                                             .receives = round.sends,
                                             .time = clock_});
}

/// Counts and times of a peer are believed only as far as they can be true.
std::string MessageOrder::why_refused(const MessagePair& pair, bool leads,
                                      const MessageNote& note) const {
  const auto at = posts_.find(pair);
  const auto [mine, theirs, rounds] = at != posts_.end() ? at->second : PairPosts{};
  const bool counts = note.kind == NoteStage::posted || note.kind == NoteStage::proposed;
  if (note.kind > NoteStage::settled || note.reserved != 0) return "it is of no kind that there is";
  if (leads == (note.kind == NoteStage::proposed)) return "its kind goes the other way";
  if (counts && note.sends == 0 && note.receives == 0) return "it is about no messages";
  if (counts && (note.sends > kMostPosted || note.receives > kMostPosted))
    return "it is about more messages than may be posted";
  if (note.kind == NoteStage::posted)
    return theirs.sends + note.sends > kMostPosted || theirs.receives + note.receives > kMostPosted
               ? "more messages are posted than may be"
               : "";
  if (note.time == 0 || note.time >= kNoTime) return "no clock has its time";
  if (note.kind == NoteStage::proposed)
    return note.sends > mine.sends || note.receives > mine.receives
               ? "it is about messages that were not posted"
               : "";
  const auto asked = asked_.find(pair);
  if (asked == asked_.end() || asked->second.empty())
    return "it settles a round that was not proposed";
  return note.time < std::get<0>(asked->second.front()) ? "it settles a round before its proposal"
                                                        : "";
}

MessageOrder::MessageSteps MessageOrder::receive(const MessagePair& pair, const MessageNote& note) {
  MessageSteps steps;
  switch (note.kind) {
    case NoteStage::posted: {
      auto& theirs = posts_[pair].theirs;
      theirs.sends += note.sends;
      theirs.receives += note.receives;
      propose_ready(pair, steps);
      break;
    }
    case NoteStage::proposed:
      posts_[pair].mine.sends -= note.sends;
      posts_[pair].mine.receives -= note.receives;
      clock_ = std::max(clock_ + 1, note.time);
      rounds_[key_of(clock_, pair, ++posts_[pair].rounds)] =
          RoundState{.round = {pair, note.sends, note.receives}, .settled = true};
      steps.met.push_back({pair, note.sends, note.receives});
      steps.notes.emplace_back(pair, MessageNote{.kind = NoteStage::settled, .time = clock_});
      break;
    case NoteStage::settled: {
      auto& asked = asked_[pair];
      auto settled = rounds_.extract(asked.front());
      asked.erase(asked.begin());
      clock_ = std::max(clock_, note.time);
      std::get<0>(settled.key()) = note.time;
      settled.mapped().settled = true;
      rounds_.insert(std::move(settled));
      break;
    }
    case NoteStage::ended: break;
  }
  launch_settled(steps);
  return steps;
}

/// The times of other rounds can only grow until they are settled, and new ones get later times.
void MessageOrder::launch_settled(MessageSteps& steps) {
  while (!rounds_.empty() && rounds_.begin()->second.settled) {
    steps.rounds.push_back(rounds_.begin()->second.round);
    rounds_.erase(rounds_.begin());
  }
}

MessageOrder::MessageSteps MessageOrder::drop(std::uint32_t group) {
  const auto is_of_group = [group](const auto& entry) { return entry.first.group == group; };
  std::erase_if(posts_, is_of_group);
  std::erase_if(asked_, is_of_group);
  std::erase_if(rounds_, [group](const auto& entry) {
    return std::get<MessagePair>(entry.first).group == group;
  });
  MessageSteps steps;
  launch_settled(steps);
  return steps;
}

}  // namespace muster::nccl
