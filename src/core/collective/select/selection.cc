// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/select/selection.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "core/collective/plan/hosts_plan.h"
#include "core/collective/plan/plan.h"

namespace muster::collective {
namespace {

constexpr std::array<std::string_view, kAlgorithms> kNames{
    "dissemination", "tree",     "chain",  "bruck", "direct", "ring",
    "slices",        "one_shot", "shares", "pull",  "hosts"};

/// Up to this many bytes in total, gathering everything on every rank is faster: the extra bytes
/// cost less than extra messages.
std::uint64_t gathered_bytes(const Tunables& table, int ranks) {
  const auto each = std::max<std::uint64_t>(static_cast<std::uint64_t>(ranks), fixed::kWideGroup);
  return std::min<std::uint64_t>(each * table.gathered_per_rank, fixed::kGatheredMost);
}

/// Sums within the hosts come first, so below this size the direct exchange is faster. Each rank of
/// a host beyond the first saves one tensor through the host's network; the steps within a host,
/// there and back, cost as much as `host_hop` bytes of that each, plus `host_lane` for each rank.
/// From the model (`plan/cost.h`), for the largest host, whose network is the busiest.
std::uint64_t hosts_bound(const Tunables& table, int per_host) {
  const auto lanes = static_cast<std::uint64_t>(per_host);
  return 2 * (table.host_hop + table.host_lane * lanes) / (lanes - 1);
}

/// Along a tree the root sends or receives one message per step instead of one per rank, but waits
/// for the steps in turn. From the model, in units of a message's overhead: a hop costs one at both
/// ends, plus its latency. `per_host`: of the largest host.
bool tree_pays_off(const Tunables& table, int ranks, int per_host) {
  const auto doublings = [](int number) {
    return std::bit_width(static_cast<unsigned>(number)) - 1;
  };
  const int near = doublings(per_host), far = doublings(ranks) - near;
  return ranks - 1 + (far > 0 ? table.far_hop : table.near_hop) >
         near * (2 + table.near_hop) + far * (2 + table.far_hop);
}

constexpr Algorithm kDissemination[] = {Algorithm::dissemination};
constexpr Algorithm kBroadcast[] = {Algorithm::tree, Algorithm::chain, Algorithm::hosts};
constexpr Algorithm kAllReduce[] = {Algorithm::bruck, Algorithm::slices, Algorithm::hosts};
constexpr Algorithm kReduce[] = {Algorithm::direct, Algorithm::slices, Algorithm::hosts};
constexpr Algorithm kAllGather[] = {Algorithm::bruck, Algorithm::direct, Algorithm::ring,
                                    Algorithm::hosts};
constexpr Algorithm kReduceScatter[] = {Algorithm::slices, Algorithm::hosts};
constexpr Algorithm kPieces[] = {Algorithm::tree, Algorithm::direct};
constexpr Algorithm kDirect[] = {Algorithm::direct};
constexpr Algorithm kShared[] = {Algorithm::one_shot, Algorithm::shares};
constexpr Algorithm kPull[] = {Algorithm::pull};

std::size_t index(Op op) { return static_cast<std::size_t>(op); }

template <class Slices>
std::uint64_t bytes_of(const Slices& slices) {
  std::uint64_t total = 0;
  for (const auto& slice : slices) total += slice.size();
  return total;
}

}  // namespace

std::string_view name_of(Algorithm algorithm) {
  return kNames[static_cast<std::size_t>(algorithm)];
}

std::optional<Algorithm> algorithm_named(std::string_view name) {
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  if (found == kNames.end()) return std::nullopt;
  return static_cast<Algorithm>(found - kNames.begin());
}

std::optional<Op> op_named(std::string_view name) {
  for (int op = 0; op < kCollectives; ++op) {
    if (info(static_cast<Op>(op)).name == name) return static_cast<Op>(op);
  }
  return std::nullopt;
}

std::string_view name_of(Medium medium) {
  return medium == Medium::network ? "network" : "shared_memory";
}

bool pays_to_compress(Medium medium) { return medium == Medium::network; }

std::span<const Algorithm> algorithms_of(Medium medium, Op op) {
  if (medium == Medium::shared_memory) {
    if (op == Op::all_reduce || op == Op::reduce) return kShared;
    return kPull;
  }
  switch (op) {
    case Op::broadcast: return kBroadcast;
    case Op::all_reduce: return kAllReduce;
    case Op::reduce: return kReduce;
    case Op::all_gather: return kAllGather;
    case Op::reduce_scatter: return kReduceScatter;
    case Op::gather:
    case Op::scatter: return kPieces;
    case Op::barrier: return kDissemination;
    default: return kDirect;
  }
}

std::uint64_t most_bytes(Medium medium, Op op, Algorithm algorithm, int ranks) {
  // Data that every reader reads itself must be in the line or slot: the output may be the input.
  if (algorithm == Algorithm::one_shot) return fixed::kSlotBytes;
  if (medium != Medium::network) return Selection::kAlways;
  if (algorithm == Algorithm::bruck)
    return op == Op::all_gather ? fixed::kGatheredMost
                                : fixed::kGatheredMost / static_cast<std::uint64_t>(ranks);
  if (algorithm == Algorithm::tree && op != Op::broadcast) return fixed::kGatheredMost;
  return Selection::kAlways;
}

std::uint64_t selected_bytes(const Args& args, int ranks) {
  switch (args.op) {
    case Op::broadcast: return args.outputs[0].size();
    case Op::all_reduce:
    case Op::reduce: return args.inputs[0].size();
    case Op::all_gather: return bytes_of(args.outputs);
    case Op::reduce_scatter: return bytes_of(args.inputs);
    case Op::gather: return args.inputs[0].size() * static_cast<std::uint64_t>(ranks);
    case Op::scatter: return args.outputs[0].size() * static_cast<std::uint64_t>(ranks);
    default: return 0;
  }
}

std::vector<int> first_ranks_of_hosts(std::span<const int> hosts) {
  std::vector<int> first_ranks, seen;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    if (rank > 0 && hosts[rank] == hosts[rank - 1]) continue;
    first_ranks.push_back(static_cast<int>(rank));
    seen.push_back(hosts[rank]);
  }
  std::ranges::sort(seen);
  const bool contiguous = std::ranges::adjacent_find(seen) == seen.end();
  return contiguous ? first_ranks : std::vector<int>();
}

std::vector<int> even_hosts(int ranks, int per_host) {
  std::vector<int> first_ranks;
  for (int rank = 0; rank < ranks; rank += per_host) first_ranks.push_back(rank);
  return first_ranks;
}

Selection::Selection(Medium medium, int ranks, GroupPlacement placement, const Tunables& table)
    : medium_(medium), ranks_(ranks), placement_(std::move(placement)) {
  const auto members = static_cast<std::uint64_t>(ranks);
  const auto few = static_cast<std::uint64_t>(table.few_ranks);
  const bool oversubscribed = placement_.per_core > 1,
             heavily_oversubscribed = placement_.per_core > 2;
  if (medium == Medium::shared_memory) {
    // On shared cores, each wait for another rank costs more.
    for (const Op op : {Op::all_reduce, Op::reduce})
      set_bound(op, Algorithm::one_shot, table.one_shot(oversubscribed) / members + 1);
    return;
  }
  const bool several = placement_.shares_hosts(ranks);
  const int per_host = plan::HostsPlan(0, ranks, placement_.first_ranks).most_on_a_host();
  // A chain pays off once there are more chunks than ranks. With more than two ranks per core,
  // ranks gain nothing from working at the same time: the algorithm with the fewest copies and
  // waits wins. Between hosts the root's network is the bottleneck, which `hosts` uses once.
  const std::uint64_t gathered = gathered_bytes(table, ranks);
  set_bound(Op::broadcast, Algorithm::tree,
            goes_by_hosts(Op::broadcast)          ? gathered + 1
            : ranks < 4 || heavily_oversubscribed ? kAlways
                                                  : 2 * fixed::kFragmentBytes * members + 1);
  set_bound(Op::broadcast, Algorithm::chain, goes_by_hosts(Op::broadcast) ? 0 : kAlways);
  // Between two ranks every algorithm sends the same number of bytes, so the one with the fewest
  // rounds wins, until its temporary data no longer fits the caches.
  const std::uint64_t shared_exchange =
      oversubscribed ? table.shared_exchange * few / std::max(few, members) : 0;
  set_bound(Op::all_reduce, Algorithm::bruck,
            (ranks == 2 ? table.pair_exchange : std::max(shared_exchange, gathered / members)) + 1);
  // A root that reduces alone loses nothing if there are hardly any other cores (two, or three for
  // four ranks), up to `few_ranks` ranks. More cores have not been measured.
  const bool few_cores = oversubscribed && ranks <= 2 * placement_.per_core;
  const std::uint64_t shared_reduce =
      few_cores ? 2 * table.shared_reduce
                : std::min<std::uint64_t>(table.shared_reduce, fixed::kGatheredMost / members);
  const bool by_root = ranks == 2 || (few_cores && ranks <= table.few_ranks);
  set_bound(Op::reduce, Algorithm::direct,
            by_root ? kAlways : (oversubscribed ? shared_reduce : gathered / members) + 1);
  set_bound(Op::all_gather, Algorithm::bruck,
            ranks == 2 ? 0 : (oversubscribed ? gathered / 2 : gathered) + 1);
  const bool by_tree =
      ranks > table.few_ranks && !oversubscribed && tree_pays_off(table, ranks, per_host);
  for (const Op op : {Op::gather, Op::scatter})
    set_bound(op, Algorithm::tree, by_tree ? gathered + 1 : 0);
  // The root's next message to any rank waits for the rank that shares the root's core, so the root
  // should send few messages.
  if (oversubscribed)
    set_bound(Op::scatter, Algorithm::tree,
              std::clamp<std::uint64_t>(table.shared_scatter / members, table.shared_scatter / 8,
                                        table.shared_scatter / 4) +
                  1);
  // A ring avoids many simultaneous streams through the network's switches. With few ranks that is
  // not needed, and a ring takes one round per rank. With several ranks per host the direct
  // exchange and the ring send a block to a host once per rank.
  set_bound(Op::all_gather, Algorithm::direct,
            ranks > table.few_ranks ? 0
            : several               ? table.gather_by_hosts + 1
                                    : kAlways);
  set_bound(Op::all_gather, Algorithm::ring, several ? 0 : kAlways);
  const std::uint64_t hosts_from = several ? hosts_bound(table, per_host) : kAlways;
  for (const Op op : {Op::all_reduce, Op::reduce, Op::reduce_scatter})
    set_bound(op, Algorithm::slices, hosts_from);
}

void Selection::set_bound(Op op, Algorithm algorithm, std::uint64_t bound) {
  const auto row = algorithms_of(medium_, op);
  for (std::size_t k = 0; k + 1 < row.size(); ++k) {
    if (row[k] != algorithm) continue;
    if (algorithm == Algorithm::one_shot)
      bound = std::max<std::uint64_t>(bound, 1);  // empty data has no shares
    const std::uint64_t most = most_bytes(medium_, op, algorithm, ranks_);
    bounds_[index(op)][k] = most == kAlways ? bound : std::min(bound, most + 1);
  }
}

void Selection::force(Op op, Algorithm algorithm) {
  const auto row = algorithms_of(medium_, op);
  if (std::find(row.begin(), row.end(), algorithm) == row.end()) return;
  for (const Algorithm each : row) set_bound(op, each, each == algorithm ? kAlways : 0);
}

std::string text_of(const Selection& selection) {
  std::string out;
  for (int number = 0; number < kCollectives; ++number) {
    const auto op = static_cast<Op>(number);
    const auto row = algorithms_of(selection.medium(), op);
    if (row.empty()) continue;
    std::string line;
    std::uint64_t covered = 0;
    for (std::size_t k = 0; k < row.size(); ++k) {
      const bool last = k + 1 == row.size();
      const auto bound =
          last ? Selection::kAlways : selection.bounds()[static_cast<std::size_t>(number)][k];
      if (bound <= covered) continue;  // never chosen
      covered = bound;
      line +=
          (line.empty() ? "" : ", then ") + std::string(name_of(selection.choose(op, bound - 1)));
      if (bound == Selection::kAlways) break;
      line += " below " + std::to_string(bound) + " bytes";
    }
    out += "\n  " + std::string(info(op).name) + ": " + line;
  }
  return out;
}

}  // namespace muster::collective
