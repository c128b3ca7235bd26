// SPDX-License-Identifier: BSD-3-Clause
/// Exceptions to the wire and back.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "muster/rpc_future.h"
#include "rpc/wire/message.h"

namespace muster::rpc {
/// Describes an exception for the wire.
ErrorText describe_exception(const std::exception_ptr& error);
/// The exception to rethrow: "worker 'ps' (rank 1): std::out_of_range in 'lookup': no such key".
std::exception_ptr remote_exception(const std::string& worker, int worker_id,
                                    const std::string& function, ErrorText error);

// An exception thrown by a function of another language.

/// Carries a ready description, which is sent to the caller unchanged; `type` is the exception's
/// name in the other language.
class DescribedError : public std::runtime_error {
 public:
  explicit DescribedError(ErrorText error)
      : std::runtime_error(error.type + ": " + error.text), error_(std::move(error)) {}
  const ErrorText& described() const noexcept { return error_; }

 private:
  ErrorText error_;
};

}  // namespace muster::rpc
