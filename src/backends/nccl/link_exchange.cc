// SPDX-License-Identifier: BSD-3-Clause
#include "backends/nccl/link_exchange.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <thread>
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

/// For the watch of calls, which says in the program's words why the links have failed.
constexpr Duration kReasonLimit = std::chrono::seconds(1);  // limit: of a machine that is busy

/// Waits for a message of the links.
void await(const collective::PendingRef& pending, const NcclCommunicator::GiveUp& give_up) {
  while (!pending->done()) {
    static_cast<void>(pending->wait(deadline_after(steady_clock(), tunables().nccl_look)));
    give_up();
  }
  const auto status = pending->wait(TimePoint::max());
  if (status.ok()) return;
  const TimePoint end = deadline_after(steady_clock(), kReasonLimit);
  for (; steady_clock().now() < end; std::this_thread::sleep_for(tunables().nccl_poll)) give_up();
  throw_backend_error(status);
}

/// `held` owns `memory`, which the links use until the message has ended.
collective::PendingRef start_message(collective::Communicator& links, Op op, int peer,
                                     std::uint64_t tag, std::span<std::byte> memory,
                                     std::shared_ptr<void> held) {
  collective::Args args;
  args.op = op;
  args.root = peer;
  args.tag = tag;
  if (op == Op::send)
    args.inputs = {memory};
  else
    args.outputs = {memory};
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

/// How the ranks of a new communicator get its ids: all of them tell the first one their devices,
/// and the ids that they make, and it answers.
class IdExchange {
 public:
  struct OpeningOffer {
    RankDevice device = {};
    std::int32_t ids = 1;  // all of the communicator's, as this rank has it
    UniqueId id = {};      // if this rank makes one
  };
  struct OpeningAnswer {
    SharedDevice shared = {};
    std::int32_t ids = 1;
    std::int32_t place = -1, its_ids = 1;  // of a rank that has another number of ids; -1: none has
    bool is_good() const { return !shared.is_shared() && place < 0; }
    /// Whether the places are those of so many ranks: they come from another rank.
    bool fits(std::int32_t ranks) const {
      return shared.first < ranks && shared.second < ranks && place < ranks &&
             shared.is_shared() == (shared.second >= 0);
    }
  };

  IdExchange(std::shared_ptr<collective::Communicator> links, const std::vector<int>& ranks,
             std::uint64_t tag, const NcclCommunicator::GiveUp& give_up)
      : links_(std::move(links)), ranks_(ranks), tag_(tag), give_up_(give_up) {}

  /// On the first rank. `make_id` makes the first id.
  void lead(const OpeningOffer& mine, const std::function<UniqueId()>& make_id) const {
    auto& offers = memory_->offers;
    offers.resize(ranks_.size());
    offers.front() = mine;
    std::vector<collective::PendingRef> come, told;
    for (std::size_t i = 1; i < ranks_.size(); ++i)
      come.push_back(start(Op::recv, i, std::span(&offers[i], 1)));
    for (const auto& pending : come) await(pending, give_up_);
    judge();
    if (answer().is_good()) collect_ids(make_id());
    for (std::size_t i = 1; i < ranks_.size(); ++i) {
      told.push_back(start(Op::send, i, std::span(&memory_->answer, 1)));
      if (answer().is_good()) told.push_back(start(Op::send, i, std::span(memory_->ids)));
    }
    if (!answer().is_good())  // the others hear it before this one's group has failed
      for (const auto& pending : told) await(pending, give_up_);
  }
  /// On the others.
  void follow(const OpeningOffer& mine) const {
    memory_->offers = {mine};
    start(Op::send, 0, std::span(memory_->offers));
    await(start(Op::recv, 0, std::span(&memory_->answer, 1)), give_up_);
    if (!answer().is_good()) return;
    memory_->ids.resize(static_cast<std::size_t>(mine.ids));
    await(start(Op::recv, 0, std::span(memory_->ids)), give_up_);
  }
  const OpeningAnswer& answer() const { return memory_->answer; }
  const std::vector<UniqueId>& ids() const { return memory_->ids; }

 private:
  struct OpeningMemory {
    std::vector<OpeningOffer> offers;
    OpeningAnswer answer;
    std::vector<UniqueId> ids;
  };

  template <class T>
  collective::PendingRef start(Op op, std::size_t place, std::span<T> what) const {
    static_assert(std::is_trivially_copyable_v<T>);
    return start_message(*links_, op, ranks_[place], tag_, std::as_writable_bytes(what), memory_);
  }
  void judge() const {
    const auto& offers = memory_->offers;
    auto& answer = memory_->answer;
    std::vector<RankDevice> devices;
    for (const auto& offer : offers) devices.push_back(offer.device);
    answer.shared = find_shared(devices);
    answer.ids = offers.front().ids;
    const auto other = std::ranges::find_if(
        offers, [&](const OpeningOffer& offer) { return offer.ids != answer.ids; });
    if (other == offers.end()) return;
    answer.place = static_cast<std::int32_t>(other - offers.begin());
    answer.its_ids = other->ids;
  }
  void collect_ids(const UniqueId& first) const {
    auto& ids = memory_->ids;
    ids.assign(static_cast<std::size_t>(answer().ids), first);
    const int ranks = static_cast<int>(ranks_.size());
    for (int place = 1; place < ranks; ++place)
      if (const int made = id_made_by(place, ranks, answer().ids); made >= 0)
        ids[static_cast<std::size_t>(made)] = memory_->offers[static_cast<std::size_t>(place)].id;
  }

  const std::shared_ptr<collective::Communicator> links_;
  const std::vector<int>& ranks_;
  const std::uint64_t tag_;
  const NcclCommunicator::GiveUp& give_up_;
  const std::shared_ptr<OpeningMemory> memory_ = std::make_shared<OpeningMemory>();
};

}  // namespace

void throw_backend_error(const Status& status) {
  throw DistBackendError(status.message(), status.code(), status.ranks());
}

std::vector<UniqueId> LinkExchange::group_ids(const NcclCommunicator& communicator,
                                              std::size_t number, int ranks_per_id,
                                              const NcclCommunicator::GiveUp& give_up) const {
  std::vector<int> all(static_cast<std::size_t>(links_->size()));
  std::iota(all.begin(), all.end(), 0);
  return ids_among(all, kFirstGroupId + number,
                   ids_for(communicator.library(), links_->size(), ranks_per_id), communicator,
                   give_up);
}

std::vector<UniqueId> LinkExchange::pair_ids(const NcclCommunicator& communicator, int peer,
                                             const NcclCommunicator::GiveUp& give_up) const {
  const int me = links_->rank();
  return ids_among({std::min(me, peer), std::max(me, peer)}, kMessageId, 1, communicator, give_up);
}

std::vector<UniqueId> LinkExchange::ids_among(const std::vector<int>& ranks, std::uint64_t tag,
                                              int ids, const NcclCommunicator& communicator,
                                              const NcclCommunicator::GiveUp& give_up) const {
  const auto& library = communicator.library();
  const auto make_id = [&] { return NcclCommunicator::unique_id(library); };
  const int place = static_cast<int>(std::ranges::find(ranks, links_->rank()) - ranks.begin());
  IdExchange::OpeningOffer mine{
      .device = RankDevice::of(library, communicator.device(), may_share_devices_), .ids = ids};
  if (id_made_by(place, static_cast<int>(ranks.size()), ids) > 0) mine.id = make_id();
  const IdExchange opening(links_, ranks, tag, give_up);
  place == 0 ? opening.lead(mine, make_id) : opening.follow(mine);
  const auto& answer = opening.answer();
  if (answer.is_good()) return opening.ids();
  std::vector<int> names;
  for (const int rank : ranks) names.push_back(members_[static_cast<std::size_t>(rank)]);
  if (!answer.fits(static_cast<std::int32_t>(names.size())))
    throw DistBackendError(
        "rank " + std::to_string(names.front()) + " speaks of ranks that there are not",
        Code::internal, {names.front()});
  if (answer.shared.is_shared()) throw_shared(answer.shared, names, communicator.device().type());
  const int other = names[static_cast<std::size_t>(answer.place)];
  throw DistBackendError(
      "the ranks differ in the number of NCCL's ids: " + std::to_string(answer.ids) + " on rank " +
          std::to_string(names.front()) + ", " + std::to_string(answer.its_ids) + " on rank " +
          std::to_string(other) +
          "; give all ranks the same TORCH_NCCL_RANKS_PER_ROOT and the same version of NCCL",
      Code::mismatch, {names.front(), other});
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

void LinkExchange::refuse_shared(const NcclLibrary& library, c10::Device mine, TimePoint deadline) {
  const auto shared =
      find_shared(gather(RankDevice::of(library, mine, may_share_devices_), deadline));
  if (shared.is_shared()) throw_shared(shared, members_, mine.type());
}

int ids_for(const NcclLibrary& library, int ranks, int ranks_per_id) {
  if (library.functions().comm_init_rank_scalable == nullptr) return 1;
  return (ranks - 1) / ranks_per_id + 1;
}

int id_made_by(int rank, int ranks, int ids) {
  const int each = ranks / ids, longer_parts = ranks % ids;
  const int in_longer = longer_parts * (each + 1);  // ranks
  if (rank < in_longer) return rank % (each + 1) == 0 ? rank / (each + 1) : -1;
  return (rank - in_longer) % each == 0 ? longer_parts + (rank - in_longer) / each : -1;
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
