// SPDX-License-Identifier: BSD-3-Clause
/// Whether ranks share a device. NCCL gives each rank a device of its own: kernels of two ranks on
/// one device wait for each other, and may have no room beside each other.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "backends/nccl/library.h"

namespace muster::nccl {

/// A rank's device, as the other ranks are told of it.
struct RankDevice {
  DeviceUuid uuid = {};
  std::int16_t index = -1;         ///< in the rank's process
  std::uint8_t is_known = 0;       ///< 0: the rank cannot tell its UUID; NCCL has to find out
  std::uint8_t may_be_shared = 0;  ///< NCCL_MULTI_RANK_GPU_ENABLE=1

  static RankDevice of(const NcclLibrary& library, c10::Device device, bool may_be_shared);
};

/// Two ranks that have one device although not both say that this is meant.
struct SharedDevice {
  std::int32_t first = -1, second = -1;  ///< their places among the ranks; -1: there are none
  std::int16_t first_index = -1, second_index = -1;
  bool is_shared() const { return first >= 0; }
};

SharedDevice find_shared(std::span<const RankDevice> devices);
/// Why NCCL is not asked. `names`: the ranks' names, by their places.
std::string words_of(const SharedDevice& shared, const std::vector<int>& names,
                     c10::DeviceType type);

}  // namespace muster::nccl
