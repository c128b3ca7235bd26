#include "core/transport/channel/channel_core.h"

#include <memory>
#include <utility>

namespace muster::transport {

int ChannelCore::position_of(int rank) const {
  const auto found = positions.find(rank);
  return found == positions.end() ? -1 : found->second;
}

TransferStateRef ChannelCore::start(bool sends, int member, std::uint64_t tag,
                                    const Fingerprint& call) {
  auto transfer = std::make_shared<TransferState>();
  transfer->sends = sends;
  transfer->channel = id;
  transfer->rank = member < 0 ? -1 : members[static_cast<std::size_t>(member)];
  transfer->set_peer(member);
  transfer->call = call;
  transfer->key = MatchKey{transfer->rank, call.sequence, tag};
  transfer->order = matcher.next_order();
  transfers.add(transfer);
  return transfer;
}

void ChannelCore::finish(TransferState& transfer, Status status) {
  if (transfer.stage == TransferState::Stage::finished) return;
  const TransferStateRef keep = transfers.remove(transfer);
  transfer.complete(std::move(status));
  engine.pass.completed = true;
}

void ChannelCore::finish_receive(TransferState& transfer, int source, const FrameHeader& header,
                                 std::size_t bytes) {
  if (transfer.stage == TransferState::Stage::finished) return;
  transfer.set_message(position_of(source), bytes, header.call);
  finish(transfer, Status());
}

bool ChannelCore::check_call(int source, const Fingerprint& call) {
  const Status status = calls.check(source, call);
  if (!status) engine.failures->on_channel_failure(id, status);
  return status.ok();
}

bool ChannelCore::is_hopeless(TransferState& transfer, int rank) {
  if (engine.ranks.has_unneeded_deaths()) engine.failures->on_needed(rank);
  if (!failure.ok()) return true;  // the failed channel has finished the transfer
  const Status& gone = why_gone(rank);
  if (!gone.ok()) finish(transfer, gone);
  return !gone.ok();
}

}  // namespace muster::transport
