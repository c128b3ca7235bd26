/// One call, checked before anything is sent, and told to the other members in 32 bytes.
#pragma once

#include <cstdint>
#include <string>

#include "muster/base/status.h"
#include "muster/collective/communicator.h"
#include "muster/transport/fingerprint.h"

namespace muster::collective {

/// Whether the member at position `rank` of a group of `size` may make this call: the number of slices, their lengths, overlaps, the root,
/// the reduction. Code::invalid_argument or Code::unsupported, with what was expected and what came. What only the root reads or writes is
/// ignored elsewhere.
Status validate(const Args& args, int rank, int size);

/// What all members must agree on in this call; `args` are valid.
transport::Fingerprint fingerprint_of(const Args& args, std::uint64_t sequence);
/// What a member tells of a call that it could not make.
transport::Fingerprint refusal_of(Op op, std::uint64_t sequence);

/// "ranks 1, 2 and 5", "rank 1".
std::string describe_ranks(const std::vector<int>& ranks);

}  // namespace muster::collective
