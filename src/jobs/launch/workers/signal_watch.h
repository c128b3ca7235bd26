/// Signals as events of a descriptor.
#pragma once

#include <signal.h>

#include <set>
#include <vector>

#include "core/base/descriptor.h"
#include "muster/status.h"

namespace muster::launch {

/// Takes over `signals` (SIGHUP not if it was ignored, as under nohup), SIGUSR1 and SIGUSR2 for
/// this thread and those it starts from now on, and ignores SIGPIPE. Undone at the end.
class SignalWatch {
 public:
  static Result<SignalWatch> open(std::set<int> signals = {SIGINT, SIGTERM, SIGHUP, SIGQUIT});
  SignalWatch(SignalWatch&&) = default;
  ~SignalWatch();

  int descriptor() const { return descriptor_.get(); }
  /// Those that came, in order.
  std::vector<int> take();
  /// The mask as it was before, for workers.
  const sigset_t& previous_mask() const { return previous_; }

 private:
  SignalWatch() = default;
  Descriptor descriptor_;
  sigset_t previous_{};
  struct sigaction previous_pipe_ {};
};

}  // namespace muster::launch
