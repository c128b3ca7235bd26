// SPDX-License-Identifier: BSD-3-Clause
/// Calls on memory of accelerators, for communicators whose calls a library carries out that takes
/// such memory.
#pragma once

#include "core/collective/communicator.h"

namespace muster::collective {

/// A Communicator may be one.
class TakesDeviceMemory {
 public:
  virtual ~TakesDeviceMemory() = default;
  /// Whether `args` may have all of its memory on CUDA devices. Work that precedes the call on
  /// their streams must be done when the call is made; the results are there when it is done.
  virtual bool takes_device_memory(const Args& args) const = 0;
};

}  // namespace muster::collective
