/// Whether the ranks of a group that is to grow out of another one fit together.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace muster::nccl {

/// What a rank brings.
struct GrowthOffer {
  enum class Readiness : std::int32_t {
    can,
    cannot,  ///< it lacks NCCL's function, or is not connected
    failed,  ///< the group it comes from
  };
  std::uint32_t parent = 0;  ///< id of the channel of the group it comes from; 0: it joins
  std::int32_t members = 0;  ///< of that group
  Readiness readiness = Readiness::can;
};

/// Whether NCCL can grow the first rank's group. Throws DistBackendError if a group has failed, or
/// if the ranks are not its members in their order and then ranks that join. `names`: the ranks'
/// names in errors.
bool can_grow(const std::vector<GrowthOffer>& offers, const std::vector<int>& names,
              const std::string& group);

}  // namespace muster::nccl
