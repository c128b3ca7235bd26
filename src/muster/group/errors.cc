#include "muster/group/errors.h"

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

}  // namespace muster::group
