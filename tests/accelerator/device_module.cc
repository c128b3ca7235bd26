// SPDX-License-Identifier: BSD-3-Clause
// The fake accelerator for programs in Python: muster_test_device.py makes it a device of torch's.
#include <pybind11/pybind11.h>

#include "testing/deferred_device.h"

namespace deferred = muster::testing::deferred;

PYBIND11_MODULE(_muster_test_device, module) {
  module.doc() = "Up to eight devices in host memory, of type \"deferred\"; for tests.";
  module.def(
      "install",
      [](int devices) {
        deferred::device_count = static_cast<c10::DeviceIndex>(devices);
        deferred::install();
      },
      "Registers the devices with torch, once.");
  module.def("device_count", [] { return static_cast<int>(deferred::device_count.load()); });
  module.def("current_device", [] { return static_cast<int>(deferred::current_device); });
  module.def("set_device",
             [](int index) { deferred::current_device = static_cast<c10::DeviceIndex>(index); });
}
