/// What a service that only compares and swaps leaves to its kind of membership.
#pragma once

#include <cstdint>

#include "jobs/membership/membership.h"

namespace muster::membership {

/// Whether `epoch` may be committed where `present` (number 0: none) lies at `revision`.
/// Code::refused, with both numbers.
Status judge_commit(const Epoch& epoch, std::int64_t expected_revision, const Epoch& present,
                    std::int64_t revision);

}  // namespace muster::membership
