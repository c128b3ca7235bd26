#include "muster/group/debug.h"

#include <pybind11/chrono.h>
#include <pybind11/functional.h>

#include "bindings.h"
#include "blocking.h"
#include "muster/group/shared_tensor.h"

namespace muster::python {
namespace {
namespace py = pybind11;
}

void bind_debug(py::module_& module) {
  py::enum_<DebugLevel>(module, "DebugLevel")
      .value("OFF", DebugLevel::OFF)
      .value("INFO", DebugLevel::INFO)
      .value("DETAIL", DebugLevel::DETAIL);
  module.def("get_debug_level", &get_debug_level);
  module.def("set_debug_level", &set_debug_level, py::arg("level"));
  module.def("set_debug_level_from_env", &set_debug_level_from_env);
  module.def(
      "monitored_barrier",
      [](const Group& group, std::optional<Duration> timeout, bool wait_all_ranks) {
        blocking(group, [&] { monitored_barrier({.group = group, .timeout = timeout, .wait_all_ranks = wait_all_ranks}); });
      },
      py::arg("group") = py::none(), py::arg("timeout") = py::none(), py::arg("wait_all_ranks") = false);
  module.def(
      "breakpoint",
      [](int rank, std::function<void()> stop) {
        // A Python debugger in place of the signal; the others wait without the GIL.
        auto before = set_breakpoint_hook([&stop] {
          const py::gil_scoped_acquire held;
          stop();
        });
        try {
          blocking(nullptr, [&] { breakpoint(rank); });
        } catch (...) {
          set_breakpoint_hook(std::move(before));
          throw;
        }
        set_breakpoint_hook(std::move(before));
      },
      py::arg("rank"), py::arg("stop"));
  module.def(
      "set_timeout", [](Duration timeout, const Group& group) { set_timeout(timeout, group); }, py::arg("timeout"),
      py::arg("group") = py::none());
  module.def(
      "abort_process_group", [](const Group& group) { blocking(group, [&] { abort_process_group(group); }); },
      py::arg("group") = py::none());
  module.def(
      "empty_shared",
      [](const std::vector<std::int64_t>& size, std::optional<at::ScalarType> dtype) {
        return empty_shared(size, dtype ? at::TensorOptions(*dtype) : at::TensorOptions());
      },
      py::arg("size"), py::arg("dtype") = py::none());
}

}  // namespace muster::python
