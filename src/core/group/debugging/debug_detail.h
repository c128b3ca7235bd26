// SPDX-License-Identifier: BSD-3-Clause
/// With TORCH_DISTRIBUTED_DEBUG=DETAIL: adds shapes and call stacks of both sides to the report of
/// a mismatch. The engine detects mismatches itself; nothing is exchanged before one is found.
#pragma once

#include <functional>
#include <string>

#include "core/group/call/call.h"
#include "muster/backend.h"
#include "muster/process_group.h"
#include "muster/work.h"

namespace muster::group {

/// Calls `backend.submit(call)` for a collective. A mismatch, thrown there or by `Work::wait`, is
/// rethrown with this rank's details and those the other ranks publish in the job's store. Waits at
/// most 2 s for them.
WorkRef submit_with_details(ProcessGroupBackend& backend, Call& call);

/// For language bindings: `caller` returns the caller's stack as lines of text, on the thread of
/// the call; empty if there is none. Set it before any group exists.
void set_caller_stack(std::function<std::string()> caller);

}  // namespace muster::group
