// SPDX-License-Identifier: BSD-3-Clause
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <thread>

#include "bindings.h"
#include "core/wait/callbacks.h"
#include "no_gil.h"
#include "rpc_values.h"

namespace {

std::terminate_handler terminate_before = nullptr;
std::thread::id ending_thread;

/// Once Python ends, it unwinds every other thread that needs its interpreter again (pthread_exit,
/// up to Python 3.13): a daemon thread that returns from a call, a callback that has not returned.
/// The unwinding cannot leave a destructor and ends in this terminate handler, which stops the
/// thread forever, as Python 3.14 does. The process exits regardless of it.
[[noreturn]] void stop_where_python_ends() {
  if (muster::python::is_python_ending() && std::this_thread::get_id() != ending_thread)
    for (;;) ::pause();
  if (terminate_before != nullptr) terminate_before();
  std::abort();
}

/// Python callbacks need the interpreter. Running ones get this long to return before it shuts
/// down, and none begins afterwards.
constexpr auto kLastCallbacks = std::chrono::seconds(3);
/// Callbacks that still run then get a SystemExit, and this long to handle it. They must not be
/// stopped in the middle: torch frames below them would take the GIL from the thread that shuts
/// down the interpreter.
constexpr auto kEndedCallbacks = std::chrono::milliseconds(500);

void finish_callbacks_at_exit() {
  namespace py = pybind11;
  const auto finish = py::cpp_function(
      [] {
        auto& executor = muster::CallbackExecutor::of_process();
        const auto usable = [] { return !muster::python::is_python_ending(); };
        if (!executor.finish(kLastCallbacks, usable)) {
          {
            const py::gil_scoped_acquire held;
            for (const auto thread : executor.running_threads())
              PyThreadState_SetAsyncExc(thread, PyExc_SystemExit);
          }
          executor.finish(kEndedCallbacks, usable);
        }
        ending_thread = std::this_thread::get_id();
        terminate_before = std::set_terminate(&stop_where_python_ends);
      },
      py::call_guard<py::gil_scoped_release>());
  py::module_::import("atexit").attr("register")(finish);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  using namespace muster::python;
  module.doc() = "The C++ half of the package muster; use that.";
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
  bind_sharded(module);
  bind_local_sgd(module);
  bind_checkpoint(module);
  bind_elastic(module);
  bind_functional(module);
  bind_registry(module);
  bind_rpc(module);
  bind_rpc_autograd(module);
  bind_torch_backend(module);
  bind_torch_rendezvous(module);
}
