/// At TORCH_DISTRIBUTED_DEBUG=DETAIL: what is added to the report of a mismatch, namely shapes and
/// call stacks of both sides. The engine finds mismatches by itself; nothing is exchanged before
/// one is found.
#pragma once

#include <functional>
#include <string>

#include "muster/group/process_group.h"

namespace muster::group {

/// `backend.submit(call)`, a collective; a mismatch that it ends in, at once or in `Work::wait`, is
/// thrown with the details of this rank's call and of the others', which they leave in the job's
/// store; waits at most two seconds for them.
WorkRef submit_with_details(ProcessGroupBackend& backend, Call& call);

/// Where another language is around C++: `told` says in lines where it has called from, on the
/// thread of the call; empty where it has not. Called before there are groups.
void set_caller_stack(std::function<std::string()> told);

}  // namespace muster::group
