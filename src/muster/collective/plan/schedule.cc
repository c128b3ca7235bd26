#include "muster/collective/plan/schedule.h"

#include <algorithm>

namespace muster::collective::plan {
namespace {

Pattern pattern_of(Op op, Algorithm algorithm, int rank, int size, int root) {
  const PairwisePlan pairs{rank, size};
  using Then = pattern::Slices::Then;
  switch (algorithm) {
    case Algorithm::dissemination: return pattern::Dissemination{{rank, size}};
    case Algorithm::tree: return pattern::Down<TreePlan>{{rank, size, root}};
    case Algorithm::chain: return pattern::Down<ChainPlan>{{rank, size, root}};
    case Algorithm::bruck: return pattern::Bruck{{rank, size}};
    case Algorithm::ring:
      if (op == Op::all_reduce) return pattern::RingReduce{{rank, size}};
      return pattern::Ring{{rank, size}};
    case Algorithm::recursive_doubling: return pattern::RecursiveDoubling{{rank, size}};
    case Algorithm::slices:
      return pattern::Slices{pairs, op == Op::all_reduce ? Then::all : op == Op::reduce ? Then::root : Then::nobody, root};
    default: break;
  }
  switch (op) {
    case Op::all_gather: return pattern::Spread{pairs};
    case Op::scatter: return pattern::FromRoot{pairs, root};
    case Op::all_to_all: return pattern::Slices{pairs, Then::nobody, root};
    default: return pattern::ToRoot{pairs, root};
  }
}

}  // namespace

bool Schedule::exists(Op op, Algorithm algorithm) {
  if (op == Op::all_reduce && (algorithm == Algorithm::ring || algorithm == Algorithm::recursive_doubling)) return true;
  const auto row = algorithms_of(Ground::links, op);
  return std::find(row.begin(), row.end(), algorithm) != row.end();
}

Schedule::Schedule(Op op, Algorithm algorithm, int rank, int size, int root) : pattern_(pattern_of(op, algorithm, rank, size, root)) {}

}  // namespace muster::collective::plan
