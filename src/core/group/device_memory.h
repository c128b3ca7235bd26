// SPDX-License-Identifier: BSD-3-Clause
/// Calls on the memory of an accelerator's tensors, without staging (`backends/staging.h`), by a
/// library that takes it.
#pragma once

#include <c10/core/DeviceType.h>

#include <atomic>

#include "core/collective/communicator.h"
#include "core/group/call/call.h"

namespace muster::group {

/// The kind of device whose memory such libraries take. Tests set that of their own device.
inline std::atomic<c10::DeviceType> device_of_libraries{c10::DeviceType::CUDA};

/// Gives `call`, which is not dense, its tensors' own memory and waits for what precedes it on the
/// current stream, if `communicator` takes that memory. Otherwise returns false: the call must be
/// staged.
bool use_device_memory(Call& call, const collective::Communicator& communicator);

}  // namespace muster::group
