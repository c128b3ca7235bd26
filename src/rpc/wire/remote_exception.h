/// Exceptions to the wire and back.
#pragma once

#include <exception>
#include <string>

#include "muster/rpc_future.h"
#include "rpc/wire/message.h"

namespace muster::rpc {

/// Describes an exception for the wire.
ErrorText describe_exception(const std::exception_ptr& error);
/// The exception to rethrow: "worker 'ps' (rank 1): std::out_of_range in 'lookup': no such key".
std::exception_ptr remote_exception(const std::string& worker, int worker_id,
                                    const std::string& function, ErrorText error);

}  // namespace muster::rpc
