// SPDX-License-Identifier: BSD-3-Clause
/// From functions of NCCL to kernels on streams. The calls of a group become one kernel for each
/// communicator, as https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/groups.html
/// says.
#pragma once

#include <functional>
#include <string>

#include "backends/nccl/library.h"
#include "comm.h"

namespace muster::standin {

using nccl::ErrorCode;
inline constexpr ErrorCode kInternalError = 3, kInvalidArgument = 4, kInvalidUsage = 5,
                           kRemoteError = 6;

/// The calling thread has one of its own.
std::string& last_error();

/// Counts a function call, or a kernel.
void count(const char* what);
int counted(const std::string& what);
/// Lets the threads go that NCCL keeps; their calls fail.
void release_kept_threads();
int kept_threads();
/// A use of NCCL that its documents forbid.
void note_violation(const std::string& text);
/// The first of them since the last call of this function; empty: none.
std::string violation();

ErrorCode enqueue_collective(nccl::CommHandle comm, nccl::StreamHandle stream,
                             std::function<void(Comm&)> body);
ErrorCode enqueue_message(nccl::CommHandle comm, nccl::StreamHandle stream,
                          const NcclTransfer& message);
void begin_group();
/// Ends a group. The outermost one issues the kernels and ends the communicators that it aborts.
ErrorCode end_group();

/// Whether NCCL refuses to use it: the previous operation has not returned ncclSuccess.
bool is_busy(Comm& comm);
/// A look at the communicator, by which a kernel in progress comes to its stream in the end.
/// Whether one still is in progress.
bool look_for_progress(Comm& comm);
/// Ends its kernels.
void revoke_comm(Comm& comm);
/// Ends its kernels and frees it, at the end of the group if there is one.
void abort_comm(Comm* comm);
/// Waits for its kernels and frees it.
void destroy_comm(Comm* comm);

}  // namespace muster::standin
