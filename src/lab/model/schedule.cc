// SPDX-License-Identifier: BSD-3-Clause
#include "lab/model/schedule.h"

#include <algorithm>

namespace muster::collective::plan {
namespace {

Pattern pattern_of(Op op, Algorithm algorithm, int rank, int size, int root,
                   std::span<const int> first_ranks) {
  const PairwisePlan pairs{rank, size};
  using ResultTo = pattern::HostsReduce::ResultTo;
  const ResultTo result_to = op == Op::all_reduce ? ResultTo::all
                             : op == Op::reduce   ? ResultTo::root
                                                  : ResultTo::none;
  switch (algorithm) {
    case Algorithm::dissemination: return pattern::Dissemination{{rank, size}};
    case Algorithm::tree:
      if (op == Op::gather) return pattern::TreeGather{{rank, size, root}};
      if (op == Op::scatter) return pattern::TreeScatter{{rank, size, root}};
      return pattern::Broadcast<TreePlan>{{rank, size, root}};
    case Algorithm::chain: return pattern::Broadcast<ChainPlan>{{rank, size, root}};
    case Algorithm::bruck: return pattern::Bruck{{rank, size}};
    case Algorithm::ring:
      if (op == Op::all_reduce) return pattern::RingReduce{{rank, size}};
      return pattern::Ring{{rank, size}};
    case Algorithm::slices:
      return pattern::HostsReduce{hosts_plan_of(op, rank, size, {}, root), result_to, root};
    case Algorithm::hosts: {
      const auto plan = hosts_plan_of(op, rank, size, first_ranks, root);
      if (op == Op::all_gather) return pattern::HostsAllGather{plan};
      if (op == Op::broadcast) return pattern::HostsBroadcast{plan, root};
      return pattern::HostsReduce{plan, result_to, root};
    }
    default: break;
  }
  switch (op) {
    case Op::all_gather: return pattern::DirectExchange{pairs, Payload::Kind::block};
    case Op::scatter: return pattern::DirectScatter{pairs, root};
    case Op::all_to_all: return pattern::DirectExchange{pairs, Payload::Kind::piece};
    default: return pattern::DirectGather{pairs, root};
  }
}

}  // namespace

bool Schedule::exists(Op op, Algorithm algorithm) {
  if (op == Op::all_reduce && algorithm == Algorithm::ring) return true;
  const auto row = algorithms_of(Medium::network, op);
  return std::find(row.begin(), row.end(), algorithm) != row.end();
}

Schedule::Schedule(Op op, Algorithm algorithm, int rank, int size, int root,
                   std::span<const int> first_ranks)
    : pattern_(pattern_of(op, algorithm, rank, size, root, first_ranks)), slices_(size) {
  if (const auto* broadcast = std::get_if<pattern::HostsBroadcast>(&pattern_))
    slices_ = broadcast->plan.pieces();
  if (const auto* reduce = std::get_if<pattern::HostsReduce>(&pattern_))
    slices_ = reduce->plan.pieces();
}

}  // namespace muster::collective::plan
