// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/call/quantized_sum.h"

#include <mutex>
#include <unordered_set>

namespace muster::group {
namespace {

/// The memory of all claimed tensors. Never destroyed: calls may outlive statics.
struct ClaimedRests {
  std::mutex lock;
  std::unordered_set<const void*> memory;  // under the lock
  static ClaimedRests& of_process() {
    static auto* const claimed = new ClaimedRests;
    return *claimed;
  }
};

}  // namespace

std::shared_ptr<const FeedbackClaim> FeedbackClaim::make(const at::Tensor& rests) {
  if (rests.numel() > 0) {  // an empty one has no memory
    ClaimedRests& claimed = ClaimedRests::of_process();
    const std::lock_guard guard(claimed.lock);
    if (!claimed.memory.insert(rests.const_data_ptr()).second) return nullptr;
  }
  return std::shared_ptr<const FeedbackClaim>(new FeedbackClaim(rests));
}

FeedbackClaim::~FeedbackClaim() {
  ClaimedRests& claimed = ClaimedRests::of_process();
  const std::lock_guard guard(claimed.lock);
  claimed.memory.erase(rests_.const_data_ptr());
}

}  // namespace muster::group
