// SPDX-License-Identifier: BSD-3-Clause
/// Flow control: how much unmatched data a sender may have at a receiver, per channel. Private to
/// `transport/`; under the engine's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>

#include "core/transport/channel/messages.h"
#include "core/tunables/tunables.h"

namespace muster::transport {

inline constexpr std::size_t kEagerCredit = fixed::kFragmentBytes;  ///< bytes of eager messages
inline constexpr std::uint32_t kEnvelopeCredit =
    fixed::kEnvelopeCredit;  ///< messages, eager or announced

/// A channel's account with one peer, as sender and as receiver.
struct CreditState {
  // Credit is returned when a quarter of it is due. A sender without credit therefore always gets
  // some: the credit it lacks is either held by unmatched messages at the receiver or due.
  static constexpr std::size_t kEagerDue = kEagerCredit / 4;
  static constexpr std::uint32_t kEnvelopesDue = kEnvelopeCredit / 4;

  // As sender.
  std::size_t eager_left = kEagerCredit;
  std::uint32_t envelopes_left = kEnvelopeCredit;
  std::deque<TransferStateRef> blocked;  // sends without credit
  TransferStateRef sent;  // shared transfer of all messages that the stream accepted inline

  void spend(std::size_t eager_bytes) {
    --envelopes_left;
    eager_left -= eager_bytes;
  }
  void unspend(std::size_t eager_bytes) {
    ++envelopes_left;
    eager_left += eager_bytes;
  }
  /// False where that is more than was ever spent.
  bool refill(std::uint64_t envelopes, std::uint64_t eager_bytes) {
    if (envelopes > kEnvelopeCredit - envelopes_left || eager_bytes > kEagerCredit - eager_left)
      return false;
    envelopes_left += static_cast<std::uint32_t>(envelopes);
    eager_left += static_cast<std::size_t>(eager_bytes);
    return true;
  }

  // As receiver.
  std::size_t eager_held = 0;  // part of the peer's credit that is used and not returned
  std::uint32_t envelopes_held = 0;
  std::size_t eager_due = 0;  // matched; to be returned with the next credit frame
  std::uint32_t envelopes_due = 0;

  /// Whether the peer may have sent such a message.
  bool allows(std::size_t eager_bytes) const {
    return envelopes_held < kEnvelopeCredit && eager_held + eager_bytes <= kEagerCredit;
  }
  void hold(std::size_t eager_bytes) {
    ++envelopes_held;
    eager_held += eager_bytes;
  }
  /// A receive has taken a message. True once a credit frame has to go back.
  bool take(std::size_t eager_bytes) {
    ++envelopes_due;
    eager_due += eager_bytes;
    return envelopes_due >= kEnvelopesDue || eager_due >= kEagerDue;
  }
  void give_back() {
    envelopes_held -= envelopes_due;
    eager_held -= eager_due;
    envelopes_due = 0;
    eager_due = 0;
  }
};

/// The accounts of one channel, by peer.
class CreditTable {
 public:
  /// Valid until `clear`. The last one is cached, because consecutive messages of a group often go
  /// to one peer.
  CreditState& with(int rank) {
    if (rank != last_peer_) {
      last_ = &states_[rank];
      last_peer_ = rank;
    }
    return *last_;
  }
  void clear() {
    states_.clear();
    last_peer_ = -1;
  }
  void drop_blocked(int rank) {
    if (const auto found = states_.find(rank); found != states_.end())
      found->second.blocked.clear();
  }
  void drop_blocked() {
    for (auto& [rank, state] : states_) state.blocked.clear();
  }

 private:
  std::unordered_map<int, CreditState> states_;
  int last_peer_ = -1;
  CreditState* last_ = nullptr;
};

}  // namespace muster::transport
