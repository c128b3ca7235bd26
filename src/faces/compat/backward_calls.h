// SPDX-License-Identifier: BSD-3-Clause
/// Calls that stock torch starts in a backward pass, as its DDP does for every bucket, on a host
/// whose cores are all taken by ranks that compute. A thread beside them could only take core and
/// cache away: the thread that runs the pass moves the calls itself, when it starts the next one
/// and at the end of the pass, where DDP waits for their futures.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "muster/process_group.h"
#include "muster/work.h"

namespace muster::compat {

/// The calls of one group in one pass. Thread-safe.
///
/// Lock order: `Latest::mutex`, then `mutex_`. Neither is held while a call is waited for.
class BackwardCalls {
 public:
  /// A group's reference to the calls of the last pass that it was called in. `mutex` guards it.
  struct Latest {
    std::mutex mutex;
    std::weak_ptr<BackwardCalls> calls;
  };
  /// The calls of the pass that the calling thread is in, for its next call of `group`. From here
  /// on the progress thread leaves them alone, until the pass is over or the thread stands still.
  /// Null outside of a pass, at its very end, and if another core is free.
  static std::shared_ptr<BackwardCalls> of_this_pass(const ProcessGroup& group, Latest& latest);
  BackwardCalls(int pass, std::shared_ptr<void> driving)
      : pass_(pass), driving_(std::move(driving)) {}

  /// The end of the pass drives these until they are done, for at most 100 ms: DDP asks for futures
  /// in order to wait for them there.
  void finish_at_the_end(const std::vector<WorkRef>& works);

 private:
  void end();
  WorkRef next();

  const int pass_;                 // autograd's number
  std::shared_ptr<void> driving_;  // until the end
  std::mutex mutex_;               // guards the following
  std::vector<WorkRef> works_;     // in the order of the calls
  bool over_ = false;              // works are added no more
};

}  // namespace muster::compat
