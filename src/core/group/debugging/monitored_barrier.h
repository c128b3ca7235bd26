// SPDX-License-Identifier: BSD-3-Clause
/// Shared by the two implementations of the monitored barrier: by messages
/// (`monitored_barrier.cc`), and through the store for groups whose backends do not transfer CPU
/// memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "muster/clock.h"
#include "muster/process_group.h"

namespace muster::group {

/// Extra time beyond the timeout that members wait for rank 0's verdict.
constexpr Duration kVerdictGrace = std::chrono::seconds(10);

/// torch's error text. `ranks` are the missing ones, by their original ranks. `all`: of a barrier
/// that lists all missing ranks, which torch calls `Ranks` even if it is one.
std::string failed_text(const std::vector<int>& ranks, Duration timeout, const std::string& why,
                        bool all = false);

/// Throws the error of a rank that arrived, given rank 0's `text` about the missing ranks.
[[noreturn]] void throw_verdict(const ProcessGroup& group, const std::string& text,
                                std::vector<int> missing);

/// Runs barrier number `barrier` of this group, which has more than one member.
void monitored_barrier_over_store(ProcessGroup& group, std::int64_t barrier, Duration timeout,
                                  bool all);

}  // namespace muster::group
