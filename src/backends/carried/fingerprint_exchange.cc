// SPDX-License-Identifier: BSD-3-Clause
#include "backends/carried/fingerprint_exchange.h"

#include <algorithm>
#include <cstring>

#include "core/collective/control.h"
#include "core/collective/op.h"

namespace muster::carried {
namespace {

using transport::Channel;
using transport::Fingerprint;
using transport::TransferRef;

/// Away from the tag of `collective::Control`.
constexpr std::uint64_t kExchangeTag = collective::kFirstReservedTag + 16;
constexpr std::uint64_t kArrivalTag = 0, kReleaseTag = 1;  // of a call's steps

Status wait_for(const collective::GroupContext& group, const std::vector<TransferRef>& transfers,
                TimePoint deadline) {
  const auto over = [&] {
    return std::ranges::all_of(transfers, [](const auto& transfer) { return transfer->done(); });
  };
  if (!group.fabric->wait(over, deadline)) {
    std::vector<int> missing;
    for (const auto& transfer : transfers) {
      if (!transfer->done() && transfer->peer() >= 0)
        missing.push_back(group.job_rank_of(transfer->peer()));
      group.channel->cancel(transfer);
    }
    return Status(Code::timed_out, "not all members came in time", missing);
  }
  for (const auto& transfer : transfers)
    if (!transfer->status().ok()) return transfer->status();
  return {};
}

}  // namespace

Status exchange_over_channel(const collective::GroupContext& group, ConstBytes mine,
                             MutableBytes all, TimePoint deadline) {
  Channel& channel = *group.channel;
  Fingerprint header;
  header.op = static_cast<std::uint8_t>(collective::Op::send);
  const auto slot = [&](int member) {
    return all.subspan(static_cast<std::size_t>(member) * mine.size(), mine.size());
  };
  std::memcpy(slot(group.rank()).data(), mine.data(), mine.size());
  std::vector<TransferRef> transfers;
  if (group.rank() != 0) {
    transfers.push_back(channel.receive(0, kExchangeTag, all, header));
    transfers.push_back(channel.send(0, kExchangeTag, mine, header));
    return wait_for(group, transfers, deadline);
  }
  for (int member = 1; member < group.size(); ++member)
    transfers.push_back(channel.receive(member, kExchangeTag, slot(member), header));
  if (Status came = wait_for(group, transfers, deadline); !came) return came;
  transfers.clear();
  for (int member = 1; member < group.size(); ++member)
    transfers.push_back(channel.send(member, kExchangeTag, all, header));
  return wait_for(group, transfers, deadline);
}

FingerprintExchange::FingerprintExchange(const collective::GroupContext& group,
                                         const Fingerprint& call)
    : group_(group), call_(call) {
  Channel& channel = *group_.channel;
  channel.begin(call_);
  if (group_.rank() != 0) {
    receives_.push_back(channel.receive(0, kReleaseTag, {}, call_));
    sends_.push_back(channel.send(0, kArrivalTag, {}, call_));
    return;
  }
  for (int member = 1; member < group_.size(); ++member)
    receives_.push_back(channel.receive(member, kArrivalTag, {}, call_));
}

FingerprintExchange::~FingerprintExchange() {
  for (const auto* transfers : {&receives_, &sends_})
    for (const auto& transfer : *transfers)
      if (!transfer->done()) group_.channel->cancel(transfer);
}

bool FingerprintExchange::arrived() const {
  return std::ranges::all_of(receives_, [](const auto& transfer) { return transfer->done(); });
}

bool FingerprintExchange::poll() {
  if (!arrived()) group_.fabric->poll();
  if (!arrived() || group_.channel->failed()) return false;
  if (group_.rank() == 0 && !released_) {
    released_ = true;
    for (int member = 1; member < group_.size(); ++member)
      sends_.push_back(group_.channel->send(member, kReleaseTag, {}, call_));
  }
  return std::ranges::all_of(sends_, [](const auto& transfer) { return transfer->done(); });
}

}  // namespace muster::carried
