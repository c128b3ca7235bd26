// SPDX-License-Identifier: BSD-3-Clause
/// The exceptions that users catch. Each has a code and the ranks at fault.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "muster/status.h"

namespace muster {

/// Base class. Thrown as such for invalid arguments (Code::invalid_argument) and for calls before
/// init_process_group.
class DistError : public std::runtime_error {
 public:
  explicit DistError(const Status& status)
      : std::runtime_error(status.message()), code_(status.code()), ranks_(status.ranks()) {}
  explicit DistError(const std::string& message, Code code = Code::invalid_argument,
                     std::vector<int> ranks = {})
      : std::runtime_error(message), code_(code), ranks_(std::move(ranks)) {}

  Code code() const noexcept { return code_; }
  /// Job ranks at fault; empty if none is to blame.
  const std::vector<int>& ranks() const noexcept { return ranks_; }

 private:
  Code code_;
  std::vector<int> ranks_;
};

/// An operation failed in its backend, or the backend does not support it.
class DistBackendError : public DistError {
 public:
  using DistError::DistError;
};

/// A socket, an address or a handshake failed.
class DistNetworkError : public DistError {
 public:
  using DistError::DistError;
};

/// A store operation failed or timed out, or the initialisation that uses the store did.
class DistStoreError : public DistError {
 public:
  using DistError::DistError;
};

}  // namespace muster
