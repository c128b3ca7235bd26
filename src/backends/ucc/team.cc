// SPDX-License-Identifier: BSD-3-Clause
#include "backends/ucc/team.h"

#include <array>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>

#include "backends/carried/call.h"
#include "core/base/bytes.h"
#include "core/base/keep_forever.h"
#include "core/collective/call.h"
#include "core/collective/control.h"
#include "core/collective/op.h"
#include "core/tunables/tunables.h"

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
  // UCC is C: no exception may pass through it.
  oob.allgather = [](void* mine, void* all, std::size_t bytes, void* info, void** request) {
    try {
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
    } catch (const std::exception&) {
      return kErrorNoMessage;
    }
  };
  oob.test = [](void* request) {
    try {
      auto& exchange = *static_cast<MemberExchange*>(request);
      return exchange.over->test(exchange);
    } catch (const std::exception&) {
      return kErrorNoMessage;
    }
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

namespace {

using carried::CarriedReduction;
using carried::CarriedRequest;
using carried::Count;
using carried::Element;

constexpr auto kDestroyLimit = std::chrono::seconds(10);  // limit: it needs no other member

UccSide whole(const void* data, Count count, Element type) {
  return {.whole = {const_cast<void*>(data), static_cast<std::uint64_t>(count), type_of(type), 0}};
}

UccSide listed(const void* data, const Count* counts, const Count* places, Element type) {
  return {.list = {const_cast<void*>(data), reinterpret_cast<const std::uint64_t*>(counts),
                   reinterpret_cast<const std::uint64_t*>(places), type_of(type), 0}};
}

UccArgs args_of(UccColl coll, int root = 0) {
  UccArgs args{};
  args.mask = kArgsFlags;
  args.coll = coll;
  args.flags = kCount64 | kPlaces64;
  args.root = static_cast<std::uint64_t>(root);
  return args;
}

}  // namespace

UccType type_of(Element element) {
  static constexpr std::array<UccType, carried::kElements> kTypes{
      UccType::uint8, UccType::uint16, UccType::uint32, UccType::uint64,  UccType::int8,
      UccType::int16, UccType::int32,  UccType::int64,  UccType::float32, UccType::float64};
  return kTypes[static_cast<std::size_t>(element)];
}

UccOp op_of(CarriedReduction reduction) {
  static constexpr std::array kOps{UccOp::sum,  UccOp::prod, UccOp::min, UccOp::max,
                                   UccOp::band, UccOp::bor,  UccOp::bxor};
  return kOps[static_cast<std::size_t>(reduction)];
}

Result<std::unique_ptr<Team>> Team::make(UccLibrary& library, const collective::GroupContext& group,
                                         TimePoint deadline) {
  auto context = library.context();
  if (!context) return context.status();
  std::unique_ptr<Team> team(new Team(library, group));
  UccTeamParams params{};
  params.mask = kTeamRank | kTeamRankRange | kTeamOob;
  params.rank = static_cast<std::uint64_t>(group.rank());
  params.oob = team->out_of_band_->functions();
  const auto& functions = library.functions();
  const auto begin = [&] {
    const auto locked = library.guard();
    return functions.team_create_post(&*context, 1, &params, &team->team_);
  };
  const auto advance = [&] {
    const auto locked = library.guard();
    functions.context_progress(*context);
    return functions.team_create_test(team->team_);
  };
  UccStatus status = begin();
  while (status >= kOk && (status = advance()) > kOk) {
    if (group.channel->failed()) return team;
    if (group.now() >= deadline)
      return Status(Code::timed_out,
                    "UCC's team was not made in time: " +
                        collective::describe_ranks(team->out_of_band_->missing()) + " did not come",
                    team->out_of_band_->missing());
    std::this_thread::sleep_for(tunables().mpi_poll);
  }
  if (status == kOk || group.channel->failed()) return team;
  return carried::failed(library, "making a team", status);
}

Team::~Team() {
  if (team_ == nullptr) return;
  const auto locked = library_.guard();
  out_of_band_->leave();
  keep_forever(out_of_band_);
}

int Team::free() {
  const auto limit = std::chrono::steady_clock::now() + kDestroyLimit;
  for (;;) {
    {
      const auto locked = library_.guard();
      const UccStatus status = library_.functions().team_destroy(team_);
      if (status == kOk) team_ = nullptr;
      if (status <= kOk) return status;
    }
    if (std::chrono::steady_clock::now() >= limit) return kErrorTimedOut;
    std::this_thread::sleep_for(tunables().mpi_poll);
  }
}

int Team::start(UccArgs args, CarriedRequest& request) {
  const auto locked = library_.guard();
  UccRequest* made = nullptr;
  if (const UccStatus status = library_.functions().collective_init(&args, &made, team_);
      status < kOk)
    return status;
  request.handle = reinterpret_cast<std::uint64_t>(made);
  request.active = true;
  return std::min(library_.functions().collective_post(made), kOk);
}

int Team::barrier(CarriedRequest& request) { return start(args_of(UccColl::barrier), request); }

int Team::broadcast(void* data, Count count, Element type, int root, CarriedRequest& request) {
  auto args = args_of(UccColl::bcast, root);
  args.in = whole(data, count, type);
  return start(args, request);
}

int Team::all_reduce(const void* in, void* out, Count count, Element type, CarriedReduction op,
                     CarriedRequest& request) {
  auto args = args_of(UccColl::allreduce);
  args.in = whole(in, count, type);
  args.out = whole(out, count, type);
  args.op = op_of(op);
  if (in == out) args.flags |= kInPlace;
  return start(args, request);
}

int Team::reduce(const void* in, void* out, Count count, Element type, CarriedReduction op,
                 int root, CarriedRequest& request) {
  auto args = args_of(UccColl::reduce, root);
  args.in = whole(in, count, type);
  args.out = whole(out, count, type);
  args.op = op_of(op);
  if (in == out) args.flags |= kInPlace;
  return start(args, request);
}

int Team::all_gather(const void* in, void* out, Count each, Element type, CarriedRequest& request) {
  auto args = args_of(UccColl::allgather);
  args.in = whole(in, each, type);
  args.out = whole(out, each * size_, type);
  if (in == nullptr) args.flags |= kInPlace;
  return start(args, request);
}

int Team::gather(const void* in, void* out, Count each, Element type, int root,
                 CarriedRequest& request) {
  auto args = args_of(UccColl::gather, root);
  args.in = whole(in, each, type);
  args.out = whole(out, each * size_, type);
  if (in == nullptr) args.flags |= kInPlace;
  return start(args, request);
}

/// By lists: UCC 1.9 has no other scatter on CPUs.
int Team::scatter(const void* in, void* out, Count each, Element type, int root,
                  CarriedRequest& request) {
  auto args = args_of(UccColl::scatterv, root);
  request.counts.assign(static_cast<std::size_t>(2 * size_), each);
  for (Count i = 0; i < size_; ++i) request.counts[static_cast<std::size_t>(size_ + i)] = i * each;
  args.in = listed(in, request.counts.data(), request.counts.data() + size_, type);
  args.out = whole(out, each, type);
  if (out == nullptr) args.flags |= kInPlace;
  return start(args, request);
}

int Team::reduce_scatter(const void* in, void* out, const Count* counts, Element type,
                         CarriedReduction op, CarriedRequest& request) {
  auto args = args_of(UccColl::reduce_scatterv);
  args.in = whole(in, std::accumulate(counts, counts + size_, Count{0}), type);
  args.out = listed(out, counts, nullptr, type);
  args.op = op_of(op);
  return start(args, request);
}

int Team::all_to_all_uneven(const void* in, const Count* sent, const Count* sent_places, void* out,
                            const Count* received, const Count* received_places, Element type,
                            CarriedRequest& request) {
  auto args = args_of(UccColl::alltoallv);
  args.in = listed(in, sent, sent_places, type);
  args.out = listed(out, received, received_places, type);
  return start(args, request);
}

}  // namespace muster::ucc
