#include "bindings.h"
#include "rpc_values.h"

PYBIND11_MODULE(_C, module) {
  using namespace muster::python;
  module.doc() = "What the package muster is made of; use that.";
  bind_errors(module);
  bind_stores(module);
  bind_groups(module);
  bind_point_to_point(module);
  bind_collectives(module);
  bind_objects(module);
  bind_debug(module);
  bind_spawn(module);
  bind_mesh(module);
  bind_parallel(module);
  bind_functional(module);
  bind_registry(module);
  bind_rpc(module);
  bind_rpc_autograd(module);
  bind_torch_backend(module);
}
