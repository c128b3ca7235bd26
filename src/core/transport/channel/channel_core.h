/// The state shared by the sending and the receiving half of a channel. Private to `transport/`;
/// under the engine's lock.
///
/// Peers are job ranks here; only the `Channel` interface uses positions in the group.
#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "core/transport/channel/call_comparator.h"
#include "core/transport/channel/credit.h"
#include "core/transport/channel/message_matcher.h"
#include "core/transport/channel/transfer_list.h"
#include "core/transport/link/links.h"

namespace muster::transport {

class ChannelCore {
 public:
  ChannelCore(EngineContext& engine_context, Links& engine_links, std::uint32_t channel)
      : engine(engine_context),
        links(engine_links),
        id(channel),
        calls(engine.options.rules, engine.rank()),
        matcher(engine.ranks) {}

  bool opened() const { return !members.empty(); }
  bool has_member(int rank) const { return positions.contains(rank); }
  int position_of(int rank) const;
  int size() const { return static_cast<int>(members.size()); }

  /// A transfer on this channel, not finished. `member` may be kAnyMember.
  TransferStateRef start(bool sends, int member, std::uint64_t tag, const Fingerprint& call);
  void finish(TransferState& transfer, Status status);
  /// Completes a receive whose message (of `header`) is in its buffer.
  void finish_receive(TransferState& transfer, int source, const FrameHeader& header,
                      std::size_t bytes);
  /// Compares a call of `source` with ours. False if they disagree; the channel has then failed.
  bool check_call(int source, const Fingerprint& call);
  /// Checks what is known of the peer. If the transfer can never succeed, finishes it and returns
  /// true.
  bool is_hopeless(TransferState& transfer, int rank);
  /// Why nothing more comes from `rank` on this channel, or success.
  const Status& why_gone(int rank) const {
    const auto found = left.empty() ? left.end() : left.find(rank);
    return found == left.end() ? engine.ranks.gone(rank) : found->second;
  }

  EngineContext& engine;
  Links& links;
  const std::uint32_t id;
  std::vector<int> members;  ///< empty until the channel is opened
  std::unordered_map<int, int> positions;
  Status failure;              ///< set once, before `Channel::failed_`
  std::map<int, Status> left;  ///< members that use this channel no more
  TransferList transfers;
  CallComparator calls;
  CreditTable credits;
  MessageMatcher matcher;
};

}  // namespace muster::transport
