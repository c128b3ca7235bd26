// SPDX-License-Identifier: BSD-3-Clause
/// Joins the messages of a channel with its receives. Private to `transport/`; under the engine's
/// lock.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "core/transport/channel/messages.h"
#include "core/transport/rank_states.h"

namespace muster::transport {

class MessageMatcher {
 public:
  explicit MessageMatcher(RankStates& ranks) : ranks_(ranks) {}
  ~MessageMatcher() { drop_all(); }
  MessageMatcher(const MessageMatcher&) = delete;
  MessageMatcher& operator=(const MessageMatcher&) = delete;

  /// Numbers transfers and messages of the channel in the order of their coming.
  std::uint64_t next_order() { return next_order_++; }

  // Receives.
  void post(TransferState& receive);
  void withdraw(TransferState& receive);
  /// The receive posted first among those that this message fits, no longer posted; or null.
  TransferStateRef match(const MatchKey& message);

  // Messages that no receive has taken.
  void keep(std::unique_ptr<Envelope> envelope);
  /// The message that came first among those that this receive fits, no longer kept; or null.
  std::unique_ptr<Envelope> take_for(const TransferState& receive, std::span<const int> members);
  /// The first for which `wanted(const Envelope&)` holds, no longer kept; or null.
  template <class Predicate>
  std::unique_ptr<Envelope> take_if(const Predicate& wanted) {
    Envelope* const found = unexpected_.find_if(wanted);
    if (found != nullptr) unexpected_.remove(found);
    return std::unique_ptr<Envelope>(found);
  }
  template <class Predicate>
  void drop_if(const Predicate& unwanted) {
    while (take_if(unwanted)) {
    }
  }
  void drop_all() {
    drop_if([](const Envelope&) { return true; });
  }

  /// Whether a point-to-point message of (source, tag) that comes now would be the first one there,
  /// with no receive before it.
  bool is_untouched(const MatchKey& key) const {
    return unexpected_.find(key) == nullptr && posted_.find(key) == nullptr &&
           posted_any_.find(MatchKey{-1, 0, key.tag}) == nullptr;
  }

 private:
  Envelope* find(const TransferState& receive, std::span<const int> members) const;

  RankStates& ranks_;
  MatchTable<TransferState> posted_;      // by their source
  MatchTable<TransferState> posted_any_;  // source -1
  MatchTable<Envelope> unexpected_;
  std::uint64_t next_order_ = 0;
};

}  // namespace muster::transport
