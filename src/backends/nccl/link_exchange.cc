// SPDX-License-Identifier: BSD-3-Clause
#include "backends/nccl/link_exchange.h"

#include <algorithm>
#include <utility>

#include "core/collective/call.h"
#include "core/group/errors.h"
#include "core/tunables/tunables.h"

namespace muster::nccl {
namespace {

using collective::Op;

/// Tags of the messages that carry ids of communicators: one for messages, the others for the
/// communicators of collectives. DeviceMessages has tag 0.
constexpr std::uint64_t kMessageId = 1, kFirstGroupId = 2;

/// Waits for a message of the links.
void await(const collective::PendingRef& pending, const NcclCommunicator::GiveUp& give_up) {
  while (!pending->done()) {
    static_cast<void>(pending->wait(deadline_after(steady_clock(), tunables().nccl_look)));
    give_up();
  }
  if (const auto status = pending->wait(TimePoint::max()); !status.ok())
    throw_backend_error(status);
}

collective::PendingRef start_message(collective::Communicator& links, Op op, int peer,
                                     std::uint64_t tag, const std::shared_ptr<UniqueId>& id) {
  collective::Args args;
  args.op = op;
  args.root = peer;
  args.tag = tag;
  if (op == Op::send)
    args.inputs = {std::as_bytes(std::span(id.get(), 1))};
  else
    args.outputs = {std::as_writable_bytes(std::span(id.get(), 1))};
  collective::CallRecord record(TimePoint::max());  // the call that waits for it has a deadline
  return links.start(std::move(args), record, id);
}

/// `held`: the call's memory, which the links use until it ends, however long that takes.
void run(collective::Communicator& links, collective::Args args, TimePoint deadline,
         std::shared_ptr<void> held) {
  collective::CallRecord record(deadline);
  const auto pending = links.start(std::move(args), record, std::move(held));
  if (const auto status = pending->wait(TimePoint::max()); !status.ok())
    throw_backend_error(status);
}

}  // namespace

void throw_backend_error(const Status& status) {
  throw DistBackendError(status.message(), status.code(), status.ranks());
}

UniqueId LinkExchange::receive(int peer, std::uint64_t tag,
                               const NcclCommunicator::GiveUp& give_up) const {
  const auto id = std::make_shared<UniqueId>();
  await(start_message(*links_, Op::recv, peer, tag, id), give_up);
  return *id;
}

UniqueId LinkExchange::group_id(const NcclLibrary& library, std::size_t number,
                                const NcclCommunicator::GiveUp& give_up) const {
  const auto tag = kFirstGroupId + number;
  if (links_->rank() != 0) return receive(0, tag, give_up);
  const auto id = std::make_shared<UniqueId>(NcclCommunicator::unique_id(library));
  for (int peer = 1; peer < links_->size(); ++peer) start_message(*links_, Op::send, peer, tag, id);
  return *id;
}

UniqueId LinkExchange::pair_id(const NcclLibrary& library, int peer,
                               const NcclCommunicator::GiveUp& give_up) const {
  if (links_->rank() > peer) return receive(peer, kMessageId, give_up);
  const auto id = std::make_shared<UniqueId>(NcclCommunicator::unique_id(library));
  start_message(*links_, Op::send, peer, kMessageId, id);
  return *id;
}

std::vector<std::byte> LinkExchange::gather_bytes(std::span<const std::byte> mine,
                                                  TimePoint deadline) {
  struct GatherMemory {
    std::vector<std::byte> mine, all;
  };
  const auto memory = std::make_shared<GatherMemory>();
  memory->mine.assign(mine.begin(), mine.end());
  memory->all.resize(mine.size() * static_cast<std::size_t>(links_->size()));
  collective::Args args;
  args.op = Op::all_gather;
  args.inputs = {std::span<const std::byte>(memory->mine)};
  for (std::size_t at = 0; at < memory->all.size(); at += mine.size())
    args.outputs.push_back(std::span(memory->all).subspan(at, mine.size()));
  run(*links_, std::move(args), deadline, memory);
  return std::move(memory->all);
}

bool LinkExchange::all_say(bool mine, TimePoint deadline) {
  return std::ranges::all_of(gather(std::uint8_t{mine}, deadline),
                             [](std::uint8_t one) { return one == 1; });
}

UniqueId LinkExchange::from_first(const UniqueId& mine, TimePoint deadline) {
  const auto id = std::make_shared<UniqueId>(mine);
  collective::Args args;
  args.op = Op::broadcast;
  args.root = 0;
  args.outputs = {std::as_writable_bytes(std::span(id.get(), 1))};
  run(*links_, std::move(args), deadline, id);
  return *id;
}

bool can_grow(const std::vector<GrowthOffer>& offers, const std::vector<int>& names,
              const std::string& group) {
  using Readiness = GrowthOffer::Readiness;
  const auto& first = offers.front();
  for (std::size_t i = 0; i < offers.size(); ++i) {
    const auto& offer = offers[i];
    const auto rank = "rank " + std::to_string(names[i]);
    if (offer.readiness == Readiness::failed)
      throw DistBackendError("group " + group + " (backend nccl) cannot grow: the group that " +
                                 rank + " comes from has failed, or has a call in flight",
                             Code::aborted, {names[i]});
    const bool is_member = first.parent != 0 && static_cast<std::int32_t>(i) < first.members;
    if (offer.parent == (is_member ? first.parent : 0)) continue;
    const auto of_first = "rank " + std::to_string(names.front());
    throw DistBackendError(
        "group " + group + " (backend nccl) cannot grow: " + rank +
            (is_member ? " does not come from the group of " + of_first
                       : " comes from a group, and " + of_first + " says that it joins") +
            "; members name the group that grows, ranks that join name none",
        Code::mismatch, {names.front(), names[i]});
  }
  return first.parent != 0 && std::ranges::all_of(offers, [](const GrowthOffer& offer) {
           return offer.readiness == Readiness::can;
         });
}

}  // namespace muster::nccl
