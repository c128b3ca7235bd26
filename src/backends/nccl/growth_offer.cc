#include "backends/nccl/growth_offer.h"

#include <algorithm>

#include "core/group/errors.h"

namespace muster::nccl {

bool can_grow(const std::vector<GrowthOffer>& offers, const std::vector<int>& names,
              const std::string& group) {
  using Readiness = GrowthOffer::Readiness;
  const auto& first = offers.front();
  for (std::size_t i = 0; i < offers.size(); ++i) {
    const auto& offer = offers[i];
    const auto rank = "rank " + std::to_string(names[i]);
    if (offer.readiness == Readiness::failed)
      throw DistBackendError("group " + group + " (backend nccl) cannot grow: the group that " +
                                 rank + " comes from has failed, or has a call in flight",
                             Code::aborted, {names[i]});
    const bool is_member = first.parent != 0 && static_cast<std::int32_t>(i) < first.members;
    if (offer.parent == (is_member ? first.parent : 0)) continue;
    const auto of_first = "rank " + std::to_string(names.front());
    throw DistBackendError(
        "group " + group + " (backend nccl) cannot grow: " + rank +
            (is_member ? " does not come from the group of " + of_first
                       : " comes from a group, and " + of_first + " says that it joins") +
            "; members name the group that grows, ranks that join name none",
        Code::mismatch, {names.front(), names[i]});
  }
  return first.parent != 0 && std::ranges::all_of(offers, [](const GrowthOffer& offer) {
           return offer.readiness == Readiness::can;
         });
}

}  // namespace muster::nccl
