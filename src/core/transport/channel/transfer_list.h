/// A channel's unfinished transfers, linked through the transfers themselves. Private to
/// `transport/`; under the engine's lock.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "core/transport/channel/transfer_state.h"

namespace muster::transport {

class TransferList {
 public:
  /// Keeps the transfer alive until `remove`.
  void add(const TransferStateRef& transfer) {
    transfer->self = transfer;
    transfer->after = first_;
    if (first_ != nullptr) first_->before = transfer.get();
    first_ = transfer.get();
  }
  TransferStateRef remove(TransferState& transfer) {
    (transfer.before == nullptr ? first_ : transfer.before->after) = transfer.after;
    if (transfer.after != nullptr) transfer.after->before = transfer.before;
    transfer.before = transfer.after = nullptr;
    return std::move(transfer.self);
  }

  /// All of them, the oldest first.
  std::vector<TransferStateRef> all() const {
    std::vector<TransferStateRef> found;
    for (TransferState* each = first_; each != nullptr; each = each->after)
      found.push_back(each->self);
    std::reverse(found.begin(), found.end());
    return found;
  }
  /// Whether one waits for `rank` or wants to reach it.
  bool needs(int rank) const {
    for (const TransferState* each = first_; each != nullptr; each = each->after) {
      if (each->rank == rank || each->from == rank) return true;
    }
    return false;
  }

 private:
  TransferState* first_ = nullptr;
};

}  // namespace muster::transport
