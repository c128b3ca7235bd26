// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/errors.h"

#include "core/base/exception_status.h"

namespace muster::group {

void raise(const Status& failure) {
  switch (failure.code()) {
    case Code::network:
    case Code::refused: throw DistNetworkError(failure);
    case Code::store: throw DistStoreError(failure);
    case Code::invalid_argument: throw DistError(failure);
    default: throw DistBackendError(failure);
  }
}

void raise_from_store(const Status& failure) {
  switch (failure.code()) {
    case Code::network:
    case Code::refused: throw DistNetworkError(failure);
    case Code::invalid_argument: throw DistError(failure);
    default: throw DistStoreError(failure);
  }
}

Status status_of_thrown() {
  try {
    throw;
  } catch (const DistError& error) {
    return Status(error.code(), error.what(), error.ranks());
  } catch (...) {
    return status_of_exception();
  }
}

}  // namespace muster::group
