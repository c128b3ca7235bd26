#include "bindings.h"
#include "muster/base/callback_executor.h"
#include "no_gil.h"
#include "rpc_values.h"

namespace {

/// Callbacks of Python's need its interpreter: those that run get this long to return before it
/// ends, and none begins once it ends.
constexpr auto kLastCallbacks = std::chrono::seconds(3);

void finish_callbacks_at_exit() {
  namespace py = pybind11;
  const auto finish = py::cpp_function(
      [] {
        muster::CallbackExecutor::of_process().finish(
            kLastCallbacks, [] { return !muster::python::is_python_ending(); });
      },
      py::call_guard<py::gil_scoped_release>());
  py::module_::import("atexit").attr("register")(finish);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  using namespace muster::python;
  module.doc() = "What the package muster is made of; use that.";
  finish_callbacks_at_exit();
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
