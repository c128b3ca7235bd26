// SPDX-License-Identifier: BSD-3-Clause
// The fake accelerator for programs in C++: with this library in LD_PRELOAD, torch has it before
// main begins. MUSTER_TEST_DEVICES devices, or eight.
#include <cstdlib>

#include "testing/deferred_device.h"

namespace {

namespace deferred = muster::testing::deferred;

const bool installed = [] {
  if (const char* count = std::getenv("MUSTER_TEST_DEVICES"))
    deferred::device_count = static_cast<c10::DeviceIndex>(std::atoi(count));
  deferred::install();
  return true;
}();

}  // namespace
