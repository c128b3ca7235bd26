// SPDX-License-Identifier: BSD-3-Clause
/// Throws a `Status` of the torch-free half as one of the exceptions that users catch.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "muster/errors.h"
#include "muster/status.h"

namespace muster::group {

/// Throws `failure`, which must not be ok. Network and refused become DistNetworkError, store
/// becomes DistStoreError, invalid_argument becomes DistError, and every other code becomes
/// DistBackendError.
[[noreturn]] void raise(const Status& failure);
/// As `raise` for store operations, whose timeouts are DistStoreError too.
[[noreturn]] void raise_from_store(const Status& failure);

/// Converts the exception that is being handled; call it within a catch block. A DistError gives
/// its own code, text and ranks, any other `status_of_exception`.
Status status_of_thrown();

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

/// Ranks for messages: "[0, 2, 5]".
inline std::string list(const std::vector<int>& ranks) {
  std::string out = "[";
  for (const auto rank : ranks) out += (out.size() > 1 ? ", " : "") + std::to_string(rank);
  return out + "]";
}

}  // namespace muster::group
