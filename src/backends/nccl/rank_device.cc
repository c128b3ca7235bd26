// SPDX-License-Identifier: BSD-3-Clause
#include "backends/nccl/rank_device.h"

#include <cstddef>
#include <map>

namespace muster::nccl {

RankDevice RankDevice::of(const NcclLibrary& library, c10::Device device, bool may_be_shared) {
  RankDevice mine;
  mine.index = device.index();
  if (const auto uuid = library.device_uuid(device.index())) {
    mine.uuid = *uuid;
    mine.is_known = 1;
  }
  mine.may_be_shared = may_be_shared ? 1 : 0;
  return mine;
}

SharedDevice find_shared(std::span<const RankDevice> devices) {
  std::map<DeviceUuid, std::size_t> first_with;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    const auto& device = devices[i];
    if (device.is_known == 0) continue;
    const auto [at, is_first] = first_with.emplace(device.uuid, i);
    const auto& other = devices[at->second];
    if (is_first || (device.may_be_shared != 0 && other.may_be_shared != 0)) continue;
    return {static_cast<std::int32_t>(at->second), static_cast<std::int32_t>(i), other.index,
            device.index};
  }
  return {};
}

std::string words_of(const SharedDevice& shared, const std::vector<int>& names,
                     c10::DeviceType type) {
  const auto name = [&](std::int32_t place) {
    return std::to_string(names[static_cast<std::size_t>(place)]);
  };
  const auto first = name(shared.first), second = name(shared.second);
  return "ranks " + first + " and " + second + " use the same GPU (" +
         c10::Device(type, static_cast<c10::DeviceIndex>(shared.first_index)).str() + " of rank " +
         first + ", " +
         c10::Device(type, static_cast<c10::DeviceIndex>(shared.second_index)).str() + " of rank " +
         second +
         "), and NCCL wants one for each rank: call torch.cuda.set_device(LOCAL_RANK) before the "
         "first call. Backend native (cuda:native) shares a GPU; NCCL_MULTI_RANK_GPU_ENABLE=1 on "
         "both ranks says that sharing is meant, which NCCL can do from 2.30 on";
}

}  // namespace muster::nccl
