#include "bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "What the package muster is made of; use that.";
  muster::python::bind_torch_backend(module);
}
