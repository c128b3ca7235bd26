#include "core/collective/outstanding_transfers.h"

#include <algorithm>

namespace muster::collective {

std::vector<int> OutstandingTransfers::awaited() const {
  std::vector<int> ranks;
  for (const bool receives : {true, false}) {
    for (const TransferSlot& slot : slots_) {
      for (const Posted& posted : slot.posted) {
        if (posted.receives == receives && !posted.transfer->done())
          ranks.push_back(channel_.members()[static_cast<std::size_t>(posted.member)]);
      }
    }
    if (!ranks.empty()) break;
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

}  // namespace muster::collective
