// SPDX-License-Identifier: BSD-3-Clause
/// The default group of a process that stays through several epochs of its job.
#pragma once

#include <cstdint>
#include <string>

#include "muster/init.h"

namespace muster::group {

struct EpochPlace {
  std::int64_t number = 0;    ///< 0: MUSTER_EPOCH
  std::string agent_store{};  ///< HOST:PORT; empty: MUSTER_AGENT_STORE
};

/// init_process_group by env://, in that epoch. `options.rank` and `world_size` are given if the
/// environment's are not those of the epoch.
void init_at_epoch(const InitProcessGroupOptions& options, const EpochPlace& epoch);

/// The epoch that this process has joined last, else MUSTER_EPOCH's; 0: none. Any thread.
std::int64_t current_epoch();

}  // namespace muster::group
