// SPDX-License-Identifier: BSD-3-Clause
/// The environment's options for backend nccl. NCCL reads its own by itself.
#pragma once

#include <string>
#include <vector>

#include "backends/nccl/call_watch.h"

namespace muster::nccl {

struct Environment {
  /// TORCH_NCCL_ASYNC_ERROR_HANDLING. `abort` if it is not set and waits block, for these throw.
  ErrorHandling handling = ErrorHandling::unset;
  bool blocking_wait = false;  ///< TORCH_NCCL_BLOCKING_WAIT
  /// TORCH_NCCL_RANKS_PER_ROOT: a group of more ranks connects by an id for each so many (scalable
  /// init), as NCCL and torch advise.
  int ranks_per_id = 128;          // limit: of a start, not of calls
  bool may_share_devices = false;  ///< NCCL_MULTI_RANK_GPU_ENABLE

  /// Throws DistError naming a variable that is no number, or that asks for what the backend does
  /// not do.
  static Environment read();
  /// The variables of torch's ProcessGroupNCCL that are set and mean nothing here, sorted. They
  /// steer its watchdog and its recorder.
  static std::vector<std::string> unused();
};

}  // namespace muster::nccl
