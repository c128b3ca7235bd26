// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/channel/call_comparator.h"

#include <algorithm>

#include "core/base/dtype.h"

namespace muster::transport {

std::string CallComparator::describe(const Fingerprint& call) const {
  if (call.sequence == 0) {
    const bool known = call.dtype < kDTypes;
    return "a message" +
           (known ? " of " + std::string(name_of(static_cast<DType>(call.dtype))) : std::string());
  }
  if (rules_ != nullptr) return rules_->describe(call);
  return "operation " + std::to_string(call.op) + " (dtype " + std::to_string(call.dtype) +
         ", reduction " + std::to_string(call.reduce) + ", root " + std::to_string(call.root) +
         ", " + std::to_string(call.count) + " elements)";
}

std::vector<CallComparator::CallOfRank> CallComparator::begin(const Fingerprint& call) {
  BegunCall& slot = begun_[call.sequence % kRememberedCalls];
  slot.call = call;
  slot.valid = true;
  last_begun_ = std::max(last_begun_, call.sequence);
  // Forget calls that this member can no longer begin.
  if (call.sequence > kRememberedCalls)
    early_.erase(early_.begin(), early_.lower_bound(call.sequence - kRememberedCalls));
  const auto early = early_.find(call.sequence);
  if (early == early_.end()) return {};
  return std::move(early_.extract(early).mapped());
}

Status CallComparator::check_numbered(int source, const Fingerprint& call) {
  const BegunCall& begun = begun_[call.sequence % kRememberedCalls];
  if (begun.valid && begun.call.sequence == call.sequence) {
    const bool agree = rules_ != nullptr ? rules_->agree(call, begun.call) : call == begun.call;
    return agree ? Status() : mismatch(source, call, begun.call);
  }
  if (call.sequence <= last_begun_) return {};  // long completed, or begun out of order
  auto& calls = early_[call.sequence];
  if (std::none_of(calls.begin(), calls.end(),
                   [source](const CallOfRank& known) { return known.first == source; }))
    calls.emplace_back(source, call);
  return {};
}

Status CallComparator::mismatch(int source, const Fingerprint& theirs,
                                const Fingerprint& ours) const {
  const auto half = [this](int rank, const Fingerprint& call) {
    return "rank " + std::to_string(rank) + " called " + describe(call);
  };
  std::vector<int> ranks{source, rank_};
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  const bool mine_first = rank_ <= source;
  return Status(Code::mismatch,
                "the members of this group make different calls: as number " +
                    std::to_string(ours.sequence) + ", " +
                    (mine_first ? half(rank_, ours) : half(source, theirs)) + " while " +
                    (mine_first ? half(source, theirs) : half(rank_, ours)) +
                    "; every member must make the same calls in the same order",
                std::move(ranks));
}

}  // namespace muster::transport
