#include "muster/group/debug.h"

#include <pybind11/chrono.h>
#include <pybind11/functional.h>

#include "bindings.h"
#include "blocking.h"
#include "muster/group/shared_allocator.h"
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
  module.def("in_shared_memory", &in_shared_memory, py::arg("tensor"));
  module.def(
      "use_shared_allocator",
      [](bool enabled, std::size_t private_up_to, std::optional<std::size_t> limit, std::size_t keep, bool read_only) {
        use_shared_allocator({.enabled = enabled, .private_up_to = private_up_to, .limit = limit, .keep = keep, .read_only = read_only});
      },
      py::arg("enabled") = true, py::arg("private_up_to") = SharedAllocatorOptions().private_up_to, py::arg("limit") = py::none(),
      py::arg("keep") = SharedAllocatorOptions().keep, py::arg("read_only") = false);
  module.def("shared_allocator_stats", [] {
    const SharedAllocatorStats stats = shared_allocator_stats();
    py::dict all;
    all["enabled"] = stats.enabled;
    all["bytes_in_use"] = stats.bytes_in_use;
    all["bytes_reserved"] = stats.bytes_reserved;
    all["limit"] = stats.limit;
    all["bytes_returned"] = stats.bytes_returned;
    all["allocations"] = stats.allocations;
    all["fallbacks"] = stats.fallbacks;
    return all;
  });
  module.def("trim_shared_allocator", &trim_shared_allocator);
}

}  // namespace muster::python
