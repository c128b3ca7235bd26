// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/channel/message_matcher.h"

#include <utility>

namespace muster::transport {

void MessageMatcher::post(TransferState& receive) {
  receive.stage = TransferState::Stage::posted;
  if (receive.rank < 0) return posted_any_.add(&receive);
  posted_.add(&receive);
  ranks_.count_posted(receive.rank, 1);
}

void MessageMatcher::withdraw(TransferState& receive) {
  if (receive.rank < 0) {
    posted_any_.remove(&receive);
  } else if (posted_.remove(&receive)) {
    ranks_.count_posted(receive.rank, -1);
  }
}

TransferStateRef MessageMatcher::match(const MatchKey& message) {
  TransferState* found = posted_.find(message);
  if (message.sequence == 0) {
    TransferState* any = posted_any_.find(MatchKey{-1, 0, message.tag});
    if (any != nullptr && (found == nullptr || any->order < found->order)) found = any;
  }
  if (found == nullptr) return nullptr;
  withdraw(*found);
  found->stage = TransferState::Stage::arriving;
  found->from = message.source;
  return found->shared_from_this();
}

void MessageMatcher::keep(std::unique_ptr<Envelope> envelope) {
  envelope->arrival = next_order();
  unexpected_.add(envelope.release());
}

std::unique_ptr<Envelope> MessageMatcher::take_for(const TransferState& receive,
                                                   std::span<const int> members) {
  Envelope* const found = find(receive, members);
  if (found != nullptr) unexpected_.remove(found);
  return std::unique_ptr<Envelope>(found);
}

Envelope* MessageMatcher::find(const TransferState& receive, std::span<const int> members) const {
  if (receive.rank >= 0) return unexpected_.find(receive.key);
  if (unexpected_.empty()) return nullptr;
  Envelope* first = nullptr;
  for (const int member : members) {
    Envelope* found = unexpected_.find(MatchKey{member, 0, receive.key.tag});
    if (found != nullptr && (first == nullptr || found->arrival < first->arrival)) first = found;
  }
  return first;
}

}  // namespace muster::transport
