// SPDX-License-Identifier: BSD-3-Clause
#include "backends/nccl/link_exchange.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "backends/nccl/rank_device.h"
#include "core/collective/call.h"
#include "core/group/errors.h"
#include "core/tunables/tunables.h"

namespace muster::nccl {
namespace {

using collective::Op;

/// Tags of the messages that open communicators: one for messages, the others for the communicators
/// of collectives. DeviceMessages has tag 0.
constexpr std::uint64_t kMessageId = 1, kFirstGroupId = 2;

/// The first rank of a new communicator tells the others, each of which has told it its device.
struct OpeningAnswer {
  UniqueId id = {};
  SharedDevice shared = {};
};

/// Waits for a message of the links.
void await(const collective::PendingRef& pending, const NcclCommunicator::GiveUp& give_up) {
  while (!pending->done()) {
    static_cast<void>(pending->wait(deadline_after(steady_clock(), tunables().nccl_look)));
    give_up();
  }
  if (const auto status = pending->wait(TimePoint::max()); !status.ok())
    throw_backend_error(status);
}

/// `held` owns `what`, which the links use until the message has ended.
template <class T>
collective::PendingRef start_message(collective::Communicator& links, Op op, int peer,
                                     std::uint64_t tag, T& what, std::shared_ptr<void> held) {
  static_assert(std::is_trivially_copyable_v<T>);
  collective::Args args;
  args.op = op;
  args.root = peer;
  args.tag = tag;
  if (op == Op::send)
    args.inputs = {std::as_bytes(std::span(&what, 1))};
  else
    args.outputs = {std::as_writable_bytes(std::span(&what, 1))};
  collective::CallRecord record(TimePoint::max());  // the call that waits for it has a deadline
  return links.start(std::move(args), record, std::move(held));
}

/// `held`: the call's memory, which the links use until it ends, however long that takes.
void run(collective::Communicator& links, collective::Args args, TimePoint deadline,
         std::shared_ptr<void> held) {
  collective::CallRecord record(deadline);
  const auto pending = links.start(std::move(args), record, std::move(held));
  if (const auto status = pending->wait(TimePoint::max()); !status.ok())
    throw_backend_error(status);
}

[[noreturn]] void throw_shared(const SharedDevice& shared, const std::vector<int>& names,
                               c10::DeviceType type) {
  throw DistBackendError(words_of(shared, names, type), Code::unsupported,
                         {names[static_cast<std::size_t>(shared.first)],
                          names[static_cast<std::size_t>(shared.second)]});
}

}  // namespace

void throw_backend_error(const Status& status) {
  throw DistBackendError(status.message(), status.code(), status.ranks());
}

UniqueId LinkExchange::group_id(const NcclCommunicator& communicator, std::size_t number,
                                const NcclCommunicator::GiveUp& give_up) const {
  std::vector<int> all(static_cast<std::size_t>(links_->size()));
  std::iota(all.begin(), all.end(), 0);
  return id_among(all, kFirstGroupId + number, communicator, give_up);
}

UniqueId LinkExchange::pair_id(const NcclCommunicator& communicator, int peer,
                               const NcclCommunicator::GiveUp& give_up) const {
  const int me = links_->rank();
  return id_among({std::min(me, peer), std::max(me, peer)}, kMessageId, communicator, give_up);
}

UniqueId LinkExchange::id_among(const std::vector<int>& ranks, std::uint64_t tag,
                                const NcclCommunicator& communicator,
                                const NcclCommunicator::GiveUp& give_up) const {
  const auto& library = communicator.library();
  const auto answer = std::make_shared<OpeningAnswer>();
  const auto devices = std::make_shared<std::vector<RankDevice>>(ranks.size());
  auto& mine = devices->front();
  mine = RankDevice::of(library, communicator.device());
  if (const int first = ranks.front(); first != links_->rank()) {
    start_message(*links_, Op::send, first, tag, mine, devices);
    await(start_message(*links_, Op::recv, first, tag, *answer, answer), give_up);
  } else {
    std::vector<collective::PendingRef> come, told;
    for (std::size_t i = 1; i < ranks.size(); ++i)
      come.push_back(start_message(*links_, Op::recv, ranks[i], tag, (*devices)[i], devices));
    for (const auto& pending : come) await(pending, give_up);
    answer->shared = find_shared(*devices);
    if (!answer->shared.is_shared()) answer->id = NcclCommunicator::unique_id(library);
    for (std::size_t i = 1; i < ranks.size(); ++i)
      told.push_back(start_message(*links_, Op::send, ranks[i], tag, *answer, answer));
    if (answer->shared.is_shared())  // the others hear it before this one's group has failed
      for (const auto& pending : told) await(pending, give_up);
  }
  if (!answer->shared.is_shared()) return answer->id;
  std::vector<int> names;
  for (const int rank : ranks) names.push_back(members_[static_cast<std::size_t>(rank)]);
  throw_shared(answer->shared, names, communicator.device().type());
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

void LinkExchange::refuse_shared(const NcclLibrary& library, c10::Device mine,
                                 TimePoint deadline) {
  const auto shared = find_shared(gather(RankDevice::of(library, mine), deadline));
  if (shared.is_shared()) throw_shared(shared, members_, mine.type());
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
