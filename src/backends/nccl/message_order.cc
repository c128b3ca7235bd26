// SPDX-License-Identifier: BSD-3-Clause
#include "backends/nccl/message_order.h"

#include <algorithm>

namespace muster::nccl {

using NoteStage = MessageNote::NoteStage;

MessageOrder::MessageSteps MessageOrder::post(const MessagePair& pair, bool leads,
                                              std::uint32_t sends, std::uint32_t receives) {
  MessageSteps steps;
  if (!leads) {
    steps.notes.emplace_back(
        pair, MessageNote{.kind = NoteStage::posted, .sends = sends, .receives = receives});
    return steps;
  }
  auto& mine = posts_[pair].mine;
  mine.sends += sends;
  mine.receives += receives;
  propose_ready(pair, steps);
  return steps;
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
  const RoundKey key{++clock_, pair, ++number};
  rounds_[key] = RoundState{.round = round};
  asked_[pair].push_back(key);
  steps.notes.emplace_back(pair, MessageNote{.kind = NoteStage::proposed,
                                             .sends = round.receives,
                                             .receives = round.sends,
                                             .time = clock_});
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
      clock_ = std::max(clock_ + 1, note.time);
      rounds_[{clock_, pair, ++posts_[pair].rounds}] =
          RoundState{.round = {pair, note.sends, note.receives}, .settled = true};
      steps.notes.emplace_back(pair, MessageNote{.kind = NoteStage::settled, .time = clock_});
      break;
    case NoteStage::settled: {
      auto& asked = asked_[pair];
      if (asked.empty()) break;  // it was dropped
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
  std::erase_if(rounds_,
                [group](const auto& entry) { return std::get<1>(entry.first).group == group; });
  MessageSteps steps;
  launch_settled(steps);
  return steps;
}

}  // namespace muster::nccl
