// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/region/transfer_plan.h"

#include <algorithm>

#include "core/shm/cache_lines.h"

namespace muster::collective::region {
namespace {

/// On all receiving members together; each receives as much as this one.
std::size_t written_together(const Args& args, std::size_t members) {
  std::size_t bytes = 0;
  for (const MutableBytes output : args.outputs) bytes += output.size();
  return args.op == Op::gather ? bytes : bytes * members;
}

}  // namespace

TransferPlan TransferPlanner::plan(const Args& args) const {
  const OpInfo& table = info(args.op);
  const bool from_root = args.op == Op::broadcast || args.op == Op::scatter;
  const bool to_root = args.op == Op::reduce || args.op == Op::gather;
  const bool root = args.root == rank_;
  TransferPlan plan;
  plan.sends = from_root ? root : to_root ? !root : true;
  plan.per_member = table.lists_input;
  plan.combines = table.reduces;
  plan.scaled = table.reduces && args.reduce == Reduce::premul_sum;
  plan.single_reader =
      !plan.combines && (plan.per_member || (args.op == Op::all_gather && size() == 2));
  plan.reader = to_root ? args.root : -1;
  if (from_root && !root) {
    plan.first = args.root;
    plan.last = args.root + 1;
  } else if (!from_root && (!to_root || root)) {
    plan.last = size();
  }
  plan.chunk = plan.per_member ? layout_.column_bytes : layout_.window_bytes;
  if (size() == 2 && (from_root || to_root) && !plan.combines)
    plan.chunk = std::min(plan.chunk, relayed_chunk(args, plan));
  for (int source = plan.first; source < plan.last; ++source) {
    if (source == rank_ && !plan.combines) continue;
    plan.read_steps =
        std::max(plan.read_steps, chunks_in(output_for(args, source).size(), plan.chunk));
    if (!table.lists_output) break;  // all outputs are the same
  }
  plan.reclaims = reclaims(args, plan);
  plan.past_caches =
      !plan.combines && written_together(args, layout_.members) >= tunables().past_caches;
  // The windows of a large broadcast are in all readers' caches. Ordinary stores would have to take
  // ownership line by line.
  plan.stages_past_caches = plan.past_caches && args.op == Op::broadcast && size() > 2;
  return plan;
}

/// With two members, one fills a window while the other drains the previous one. Data that would
/// fit into one window is split as well, into as many as can be filled without waiting. (For
/// several readers on shared cores, few windows are faster.)
std::size_t TransferPlanner::relayed_chunk(const Args& args, const TransferPlan& plan) const {
  const int other = 1 - rank_;
  const std::size_t bytes =
      plan.sends ? input_for(args, plan, other).size() : output_for(args, other).size();
  return std::clamp(shm::align_up(bytes / fixed::kWindows, shm::kCacheLine), fixed::kSlotBytes,
                    fixed::kReduceChunk);
}

/// Only on hosts with two cores. The lines then move between those two cores, which is faster than
/// invalidating both copies, as long as the data stays in the caches.
bool TransferPlanner::concurrent_reclaim(Op op, std::size_t written) const {
  const std::size_t most = op == Op::broadcast                  ? fixed::kReclaimBytes
                           : layout_.members <= fixed::kWindows ? fixed::kReclaimFewBytes
                                                                : 0;
  return shm::kConcurrentReclaim && topology_.cores <= 2 && shm::writes_back_lines() &&
         written <= most;
}

/// Reclaims staged data that only this member reads, unless it is small enough to have been
/// prefetched, and data for which `concurrent_reclaim` holds.
bool TransferPlanner::reclaims(const Args& args, const TransferPlan& plan) const {
  if (!shm::writes_back_lines() || plan.scaled) return false;  // the sender reads its product too
  const bool read_by_several = args.op == Op::broadcast || (!plan.per_member && plan.reader < 0);
  if (read_by_several && size() > 2 &&
      (plan.combines || !concurrent_reclaim(args.op, written_together(args, layout_.members))))
    return false;
  if (args.op == Op::broadcast) return true;
  std::size_t most = 0;
  for (int source = plan.first; source < plan.last; ++source) {
    if (source != rank_) most = std::max(most, output_for(args, source).size());
  }
  return most > fixed::kInlineCopy;
}

/// On shared cores, waiting until the last reader has been scheduled takes longer than the copy.
bool TransferPlanner::copies_from_arena(Op op, std::size_t given) const {
  return topology_.oversubscribed() &&
         (op == Op::reduce || op == Op::reduce_scatter || op == Op::all_to_all) &&
         given * layout_.members <= fixed::kEarlyCopy;
}

void copy_own(const Args& args, const TransferPlan& plan, int rank) {
  if (plan.combines || args.op == Op::broadcast || args.op == Op::barrier) return;
  if ((args.op == Op::gather || args.op == Op::scatter) && args.root != rank) return;
  const ConstBytes mine = input_for(args, plan, rank);
  const MutableBytes to = output_for(args, rank);
  copy_bytes(to.data(), mine.data(), std::min(mine.size(), to.size()), plan.past_caches);
}

}  // namespace muster::collective::region
