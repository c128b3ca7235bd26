/// The parts of the extension module `muster._C`: one file for each layer of the Python face.
///
/// Functions that may block let go of the GIL. Durations are datetime.timedelta.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace muster::python {

void bind_torch_backend(pybind11::module_& module);

}  // namespace muster::python
