/// The exceptions that users catch. From `group/` up, a failure that the torch-free half reports as
/// a `Status` is thrown as one of these; code and ranks at fault travel with it.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "muster/base/status.h"

namespace muster {

/// The base of all: also wrong arguments (Code::invalid_argument) and calls before
/// init_process_group.
class DistError : public std::runtime_error {
 public:
  explicit DistError(const Status& status)
      : std::runtime_error(status.message()), code_(status.code()), ranks_(status.ranks()) {}
  explicit DistError(const std::string& message, Code code = Code::invalid_argument,
                     std::vector<int> ranks = {})
      : std::runtime_error(message), code_(code), ranks_(std::move(ranks)) {}

  Code code() const noexcept { return code_; }
  /// Ranks of the job at fault; empty where none is to blame.
  const std::vector<int>& ranks() const noexcept { return ranks_; }

 private:
  Code code_;
  std::vector<int> ranks_;
};

/// An operation failed in its backend, or the backend does not have it.
class DistBackendError : public DistError {
 public:
  using DistError::DistError;
};

/// A socket, an address or a handshake failed.
class DistNetworkError : public DistError {
 public:
  using DistError::DistError;
};

/// A store, or the initialisation that goes through it, failed or timed out.
class DistStoreError : public DistError {
 public:
  using DistError::DistError;
};

namespace group {

/// Throws `failure` (which must not be a success) as the class that its code asks for: network and
/// refused as DistNetworkError, store as DistStoreError, invalid_argument as DistError, all else as
/// DistBackendError.
[[noreturn]] void raise(const Status& failure);
/// The same for what happens in a store: timeouts are DistStoreError too.
[[noreturn]] void raise_from_store(const Status& failure);

inline void check(const Status& status) {
  if (!status.ok()) raise(status);
}
template <class T>
T take(Result<T> result) {
  if (!result.ok()) raise(result.status());
  return std::move(result).value();
}
[[noreturn]] inline void invalid(const std::string& message) {
  throw DistError(message, Code::invalid_argument);
}

}  // namespace group
}  // namespace muster
