#include "core/collective/queue/inline_call.h"

#include <algorithm>

#include "core/collective/single_rank.h"
#include "core/tunables/tunables.h"

namespace muster::collective {

bool InlineCall::run_bounded(Driver& driver) {
  if (queue_.region_ != nullptr)
    return queue_.region_->inline_calls().may_block() && !driver.busy() && run_in_region();
  if (queue_.group_.size() > 1) return !driver.busy() && run_over_links();
  on_started();
  run_single_rank(args_);
  return true;
}

/// Leaves the rest in `task_` if it does not complete within a round trip, or has failed.
bool InlineCall::run_over_links() {
  if (!memory_of(args_).small) return false;
  const GroupContext& group = queue_.group_;
  group.channel->begin(fingerprint);
  remember();
  task_ = queue_.links_.run(args_, fingerprint);
  task_.step();
  on_started();
  const TimePoint end = std::min(record.deadline, group.now() + tunables().round_trip);
  return group.fabric->wait([this] { return task_.step(); }, end) && task_.peek().ok();
}

/// Recorded before the first byte moves, so that the traces of a killed member show the call. For
/// up to one round trip, the thread polls only for this call.
bool InlineCall::run_in_region() {
  record.completed_inline = false;
  queue_.group_.channel->begin(fingerprint);
  on_started();
  task_ = queue_.region_->run(args_, fingerprint);
  return queue_.region_->inline_calls().drive_until(task_, record.deadline) && task_.peek().ok();
}

}  // namespace muster::collective
