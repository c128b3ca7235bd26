/// What the two ways to carry out a monitored barrier share: over messages
/// (`monitored_barrier.cc`), and over the store for groups whose backends move no bytes between
/// processors' memories.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "muster/base/clock.h"
#include "muster/group/process_group.h"

namespace muster::group {

/// How much longer than the timeout the others wait for rank 0's verdict.
constexpr Duration kVerdictGrace = std::chrono::seconds(10);

/// torch's text. `ranks`: those missing, by their first numbers.
std::string failed_text(const std::vector<int>& ranks, Duration timeout, const std::string& why);

/// Throws what a rank that has come throws, when rank 0 says `text` about the missing ones.
[[noreturn]] void tell_verdict(const ProcessGroup& group, const std::string& text,
                               std::vector<int> missing);

/// Number `barrier` of this group, of more than one member.
void monitored_barrier_over_store(ProcessGroup& group, std::int64_t barrier, Duration timeout,
                                  bool all);

}  // namespace muster::group
