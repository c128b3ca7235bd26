// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/links/link_group.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "core/collective/kernels/kernels.h"
#include "core/collective/plan/plan.h"
#include "core/transport/channel/channel.h"
#include "core/tunables/tunables.h"

namespace muster::collective {

std::vector<int> OutstandingTransfers::awaited() const {
  std::vector<int> ranks;
  for (const bool receives : {true, false}) {
    for (const TransferSlot& slot : slots_) {
      for (const Posted& posted : slot.posted) {
        if (posted.receives == receives && !posted.transfer->done())
          ranks.push_back(channel_.members()[static_cast<std::size_t>(posted.member)]);
      }
    }
    if (!ranks.empty()) break;
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

}  // namespace

void LinkGroup::copy(MutableBytes to, ConstBytes from) {
  if (!from.empty() && to.data() != from.data()) std::memcpy(to.data(), from.data(), from.size());
}

void LinkGroup::contribute(std::byte* to, ConstBytes from, const Args& args) {
  if (args.reduce == Reduce::premul_sum) {
    scale(to, from.data(), elements_in(from.size(), args.dtype), args.dtype, args.factor);
  } else {
    copy({to, from.size()}, from);
  }
}

std::byte* LinkGroup::scratch(std::size_t bytes) {
  if (bytes > scratch_bytes_ || scratch_ == nullptr) {
    scratch_.reset();
    scratch_bytes_ = bytes < 4096 ? 4096 : bytes;  // limit: a page
    scratch_.reset(static_cast<std::byte*>(::operator new (scratch_bytes_, std::align_val_t{64})));
  }
  return scratch_.get();
}

void LinkGroup::drop_large_scratch() {
  if (scratch_bytes_ <= tunables().kept_scratch) return;
  scratch_.reset();
  scratch_bytes_ = 0;
}

Task<Status> LinkGroup::finish() {
  co_await until([this] { return outstanding_.all_done(); });
  co_return outstanding_.status();
}

Task<Status> LinkGroup::run(const Args& args, const transport::Fingerprint& call) {
  outstanding_.begin(call);
  if (args.pieces != nullptr) return all_reduce_in_pieces(args);
  const Algorithm algorithm = selection_.choose(args.op, selected_bytes(args, size_));
  if (algorithm == Algorithm::slices) return run_by_hosts(args, {});
  if (algorithm == Algorithm::hosts) return run_by_hosts(args, selection_.first_ranks());
  switch (args.op) {
    case Op::broadcast:
      return algorithm == Algorithm::chain
                 ? broadcast(args, plan::ChainPlan{rank_, size_, args.root, selection_.order()})
                 : broadcast(args, plan::TreePlan{rank_, size_, args.root});
    case Op::all_reduce: return all_reduce_small(args);
    case Op::reduce: return reduce_direct(args);
    case Op::all_gather:
      if (algorithm == Algorithm::bruck) return all_gather_small(args);
      return algorithm == Algorithm::direct ? all_gather_direct(args) : all_gather_ring(args);
    case Op::gather: return algorithm == Algorithm::tree ? gather_along_tree(args) : gather(args);
    case Op::scatter:
      return algorithm == Algorithm::tree ? scatter_along_tree(args) : scatter(args);
    case Op::all_to_all: return all_to_all(args);
    default: return barrier();
  }
}

Task<Status> LinkGroup::barrier() {
  const plan::DisseminationPlan plan{rank_, size_};
  for (int step = 0; step < plan.steps() && outstanding_.ok(); ++step) {
    outstanding_.receive(0, plan.source(step), static_cast<std::uint64_t>(step), {});
    outstanding_.send(1, plan.target(step), static_cast<std::uint64_t>(step), {});
    co_await until([this] { return outstanding_.done(0); });
  }
  co_return co_await finish();
}

// Chunks are pipelined: a member forwards one while the next arrives.
template <class Plan>
Task<Status> LinkGroup::broadcast(const Args& args, Plan plan) {
  constexpr int kWindow = fixed::kForwardDepth;  // slots for arrivals, and as many for departures
  const MutableBytes data = args.outputs[0];
  const std::size_t longest =
      std::clamp(plan::whole_part(data.size(), kWindow), fixed::kFragmentBytes,
                 std::max(fixed::kFragmentBytes, selection_.in_flight() / kWindow));
  const std::size_t chunks = plan::messages_for(data.size(), longest);
  const auto chunk = [&](std::size_t k) {
    const plan::Slice slice = plan::chunk_of(data.size(), longest, k);
    return data.subspan(slice.begin, slice.count);
  };
  const int parent = plan.parent();
  const int children = plan.children();
  for (std::size_t k = 0; parent >= 0 && k < chunks && k < kWindow; ++k)
    outstanding_.receive(static_cast<int>(k), parent, 0, chunk(k));
  for (std::size_t k = 0; k < chunks && outstanding_.ok(); ++k) {
    const int arrival = static_cast<int>(k % kWindow);
    const int departure = kWindow + arrival;
    if (parent >= 0) co_await until([&] { return outstanding_.done(arrival); });
    if (children > 0) co_await until([&] { return outstanding_.done(departure); });
    if (!outstanding_.ok()) break;
    for (int index = 0; index < children; ++index)
      outstanding_.send(departure, plan.child(index), 0, chunk(k));
    if (parent >= 0 && k + kWindow < chunks)
      outstanding_.receive(arrival, parent, 0, chunk(k + kWindow));
  }
  co_return co_await finish();
}

Task<Status> LinkGroup::gather_rotated(std::byte* blocks, const std::vector<std::size_t>& starts) {
  const plan::BruckPlan plan{rank_, size_};
  for (int step = 0; step < plan.steps() && outstanding_.ok(); ++step) {
    const std::size_t have = at(plan.distance(step));
    const std::size_t count = at(plan.count(step));
    const auto tag = static_cast<std::uint64_t>(step);
    // First the send, as in all_gather_direct: with two ranks both sides have the same peer.
    outstanding_.send(1, plan.target(step), tag, {blocks, starts[count]});
    outstanding_.receive(0, plan.source(step), tag,
                         {blocks + starts[have], starts[have + count] - starts[have]});
    co_await until([this] { return outstanding_.done(0); });
  }
  co_return co_await finish();
}

Task<Status> LinkGroup::all_reduce_small(const Args& args) {
  const std::size_t bytes = args.inputs[0].size();
  std::byte* blocks = scratch(bytes * at(size_));
  std::vector<std::size_t> starts(at(size_) + 1);
  for (std::size_t i = 0; i < starts.size(); ++i) starts[i] = i * bytes;
  contribute(blocks, args.inputs[0], args);
  if (Status gathered = co_await gather_rotated(blocks, starts); !gathered) co_return gathered;
  std::vector<const std::byte*> inputs(at(size_));
  const plan::BruckPlan plan{rank_, size_};
  for (int position = 0; position < size_; ++position)
    inputs[at(plan.owner(position))] = blocks + starts[at(position)];
  reduce_complete(args.outputs[0].data(), inputs, elements_in(bytes, args.dtype), args.dtype,
                  args.reduce);
  drop_large_scratch();
  co_return Status();
}

// The root reduces a chunk while it is still in the cache and the next one arrives.
Task<Status> LinkGroup::reduce_direct(const Args& args) {
  constexpr std::size_t kWindow = fixed::kReduceDepth;  // chunk k uses slot k % kWindow
  constexpr int kRtrSlot = kWindow;
  enum DirectPart : std::uint64_t { kPart, kReadyToReceive };
  const bool root = rank_ == args.root;
  const bool scaled = args.reduce == Reduce::premul_sum;
  const std::size_t bytes = args.inputs[0].size();
  const bool uses_rtr = plan::direct_uses_rtr(bytes, size_);
  const std::size_t longest = plan::direct_chunk(bytes, size_, selection_.in_flight());
  const std::size_t chunks = plan::messages_for(bytes, longest);
  // Per outstanding chunk: the others' contributions, then the product if the operation scales.
  const std::size_t arrivals = root ? at(size_ - 1) : 0;
  const std::size_t blocks = arrivals + (scaled ? 1 : 0);
  std::byte* const memory = scratch(longest * blocks * std::min(chunks, kWindow));
  const auto block = [&](std::size_t k, std::size_t index) {
    return memory + longest * (k % kWindow * blocks + index);
  };
  const auto contribution = [&](std::size_t k) {
    const plan::Slice part = plan::chunk_of(bytes, longest, k);
    const ConstBytes mine = args.inputs[0].subspan(part.begin, part.count);
    if (!scaled) return mine;
    contribute(block(k, arrivals), mine, args);
    return ConstBytes(block(k, arrivals), part.count);
  };
  const plan::PairwisePlan peers{rank_, size_};
  const auto post = [&](std::size_t k) {
    const int slot = static_cast<int>(k % kWindow);
    if (!root) return outstanding_.send(slot, args.root, kPart, contribution(k));
    const std::size_t theirs = plan::chunk_of(bytes, longest, k).count;
    for (int step = 1; step <= peers.steps(); ++step)
      outstanding_.receive(slot, peers.source(step), kPart, {block(k, at(step - 1)), theirs});
  };
  std::vector<const std::byte*> inputs(root ? at(size_) : 0);
  const auto reduce_chunk = [&](std::size_t k) {
    const ConstBytes mine = contribution(k);
    inputs[at(rank_)] = mine.data();
    for (int step = 1; step <= peers.steps(); ++step)
      inputs[at(peers.source(step))] = block(k, at(step - 1));
    reduce_complete(args.outputs[0].data() + k * longest, inputs,
                    elements_in(mine.size(), args.dtype), args.dtype, args.reduce);
  };

  if (uses_rtr && !root) {
    outstanding_.receive(kRtrSlot, args.root, kReadyToReceive, {});
    co_await until([&] { return outstanding_.done(kRtrSlot); });
  }
  for (std::size_t k = 0; k < std::min(chunks, kWindow) && outstanding_.ok(); ++k) post(k);
  if (uses_rtr && root)
    for (int step = 1; step <= peers.steps(); ++step)
      outstanding_.send(kRtrSlot, peers.source(step), kReadyToReceive, {});
  for (std::size_t k = 0; k < chunks; ++k) {
    co_await until([&] { return outstanding_.done(static_cast<int>(k % kWindow)); });
    if (!outstanding_.ok()) break;
    if (root) reduce_chunk(k);
    if (k + kWindow < chunks) post(k + kWindow);
  }
  Status status = co_await finish();
  drop_large_scratch();
  co_return status;
}

Task<Status> LinkGroup::all_gather_small(const Args& args) {
  const plan::BruckPlan plan{rank_, size_};
  std::vector<std::size_t> starts(at(size_) + 1, 0);
  for (int position = 0; position < size_; ++position)
    starts[at(position) + 1] = starts[at(position)] + args.outputs[at(plan.owner(position))].size();
  std::byte* blocks = scratch(starts.back());
  copy({blocks, args.inputs[0].size()}, args.inputs[0]);
  if (Status gathered = co_await gather_rotated(blocks, starts); !gathered) co_return gathered;
  for (int position = 0; position < size_; ++position) {
    const MutableBytes output = args.outputs[at(plan.owner(position))];
    copy(output, {blocks + starts[at(position)], output.size()});
  }
  drop_large_scratch();
  co_return Status();
}

Task<Status> LinkGroup::all_gather_ring(const Args& args) {
  const plan::RingPlan plan{rank_, size_, selection_.order()};
  copy(args.outputs[at(rank_)], args.inputs[0]);
  for (int step = 0; step < plan.steps() && outstanding_.ok(); ++step) {
    outstanding_.receive(0, plan.previous(), 0, args.outputs[at(plan.received_block(step))]);
    outstanding_.send(1, plan.next(), 0, args.outputs[at(plan.sent_block(step))]);
    co_await until([this] { return outstanding_.done(0); });
  }
  co_return co_await finish();
}

// The sends go first: the request for a large message reaches the other side before the answer to
// its own request, with which it begins to fill the wire. Its answer would have to wait for all of
// that, and the two would send one after the other.
Task<Status> LinkGroup::all_gather_direct(const Args& args) {
  const plan::PairwisePlan plan{rank_, size_};
  for (int step = 1; step <= plan.steps(); ++step)
    outstanding_.send(1, plan.target(step), 0, args.inputs[0]);
  for (int step = 1; step <= plan.steps(); ++step)
    outstanding_.receive(0, plan.source(step), 0, args.outputs[at(plan.source(step))]);
  copy(args.outputs[at(rank_)], args.inputs[0]);
  co_return co_await finish();
}

Task<Status> LinkGroup::gather(const Args& args) {
  if (rank_ != args.root) {
    outstanding_.send(0, args.root, 0, args.inputs[0]);
    co_return co_await finish();
  }
  const plan::PairwisePlan plan{rank_, size_};
  for (int step = 1; step <= plan.steps(); ++step)
    outstanding_.receive(0, plan.source(step), 0, args.outputs[at(plan.source(step))]);
  copy(args.outputs[at(rank_)], args.inputs[0]);
  co_return co_await finish();
}

Task<Status> LinkGroup::scatter(const Args& args) {
  if (rank_ != args.root) {
    outstanding_.receive(0, args.root, 0, args.outputs[0]);
    co_return co_await finish();
  }
  const plan::PairwisePlan plan{rank_, size_};
  for (int step = 1; step <= plan.steps(); ++step)
    outstanding_.send(0, plan.target(step), 0, args.inputs[at(plan.target(step))]);
  copy(args.outputs[0], args.inputs[at(rank_)]);
  co_return co_await finish();
}

// At most `kExchanges` are outstanding at a time.
Task<Status> LinkGroup::all_to_all(const Args& args) {
  constexpr int kExchanges = fixed::kInFlight;
  const plan::PairwisePlan plan{rank_, size_};
  const auto send = [&](int step) {
    outstanding_.send(step % kExchanges, plan.target(step), 0, args.inputs[at(plan.target(step))]);
  };
  // As many sends as are in flight go first, as in all_gather_direct.
  for (int step = 1; step <= std::min(kExchanges, plan.steps()); ++step) send(step);
  for (int step = 1; step <= plan.steps() && outstanding_.ok(); ++step) {
    const int slot = step % kExchanges;
    if (step > kExchanges) {
      co_await until([&] { return outstanding_.done(slot); });
      if (!outstanding_.ok()) break;
      send(step);
    }
    outstanding_.receive(slot, plan.source(step), 0, args.outputs[at(plan.source(step))]);
  }
  copy(args.outputs[at(rank_)], args.inputs[at(rank_)]);
  co_return co_await finish();
}

}  // namespace muster::collective
