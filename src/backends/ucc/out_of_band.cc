#include "backends/ucc/out_of_band.h"

#include <cstring>
#include <memory>
#include <utility>

#include "core/base/bytes.h"
#include "core/collective/control.h"
#include "core/collective/op.h"

namespace muster::ucc {
namespace {

/// Away from the tags of `collective::Control` and of backend mpi.
constexpr std::uint64_t kTag = collective::kFirstReservedTag + 17;

}  // namespace

struct OutOfBand::MemberExchange {
  OutOfBand* over = nullptr;
  std::vector<transport::TransferRef> transfers = {};
};

UccOob OutOfBand::functions() {
  UccOob oob{};
  oob.allgather = [](void* mine, void* all, std::size_t bytes, void* info, void** request) {
    auto& self = *static_cast<OutOfBand*>(info);
    if (!self.group_) return kErrorNoMessage;
    transport::Channel& channel = *self.group_->channel;
    auto* const to = static_cast<std::byte*>(all);
    const auto slot = [&](int member) { return to + static_cast<std::size_t>(member) * bytes; };
    auto exchange = std::make_unique<MemberExchange>();
    exchange->over = &self;
    transport::Fingerprint header;
    header.op = static_cast<std::uint8_t>(collective::Op::send);
    std::memmove(slot(channel.rank()), mine, bytes);
    for (int member = 0; member < channel.size(); ++member) {
      if (member == channel.rank()) continue;
      exchange->transfers.push_back(
          channel.receive(member, kTag, MutableBytes(slot(member), bytes), header));
      exchange->transfers.push_back(channel.send(
          member, kTag, ConstBytes(static_cast<const std::byte*>(mine), bytes), header));
    }
    *request = exchange.release();
    return kOk;
  };
  oob.test = [](void* request) {
    auto& exchange = *static_cast<MemberExchange*>(request);
    return exchange.over->test(exchange);
  };
  oob.free = [](void* request) {
    const std::unique_ptr<MemberExchange> exchange(static_cast<MemberExchange*>(request));
    if (!exchange->over->group_) return kOk;
    for (const auto& transfer : exchange->transfers)
      if (!transfer->done()) exchange->over->group_->channel->cancel(transfer);
    return kOk;
  };
  oob.info = this;
  oob.members = static_cast<std::uint32_t>(group_->size());
  oob.rank = static_cast<std::uint32_t>(group_->rank());
  return oob;
}

UccStatus OutOfBand::test(MemberExchange& exchange) {
  if (!group_) return kErrorNoMessage;
  group_->fabric->poll();
  missing_.clear();
  for (const auto& transfer : exchange.transfers) {
    if (transfer->done()) {
      if (!transfer->status().ok()) return kErrorNoMessage;
      continue;
    }
    // The two of a member follow each other.
    const int missing = group_->job_rank_of(transfer->peer());
    if (missing_.empty() || missing_.back() != missing) missing_.push_back(missing);
  }
  return missing_.empty() ? kOk : kInProgress;
}

}  // namespace muster::ucc
