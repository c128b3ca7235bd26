/// What a request must be before any backend sees it. Pure; called by ProcessGroup::submit alone.
#pragma once

#include "muster/group/request.h"

namespace muster::group {

/// The tensor whose device and dtype stand for the request; null for a barrier.
const at::Tensor* representative(const Request& request);

/// Throws DistError (Code::invalid_argument) that says what to change. `size` and `rank` are the
/// group's.
void validate(const Request& request, int rank, int size);

}  // namespace muster::group
