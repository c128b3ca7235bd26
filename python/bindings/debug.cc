// SPDX-License-Identifier: BSD-3-Clause
#include "muster/debug.h"

#include <pybind11/chrono.h>
#include <pybind11/functional.h>

#include "bindings.h"
#include "blocking.h"
#include "core/base/log/log_queue.h"
#include "core/group/debugging/debug_detail.h"
#include "core/group/memory/shared_allocator.h"
#include "muster/shared_memory.h"

namespace muster::python {
namespace {
namespace py = pybind11;
using Released = py::call_guard<py::gil_scoped_release>;

constexpr int kMostFrames = 20;

/// The Python frames of this thread, as tracebacks show them, the innermost first; nothing on a
/// thread that runs no Python.
std::string python_stack() {
  if (Py_IsInitialized() == 0 || PyGILState_GetThisThreadState() == nullptr) return {};
  const py::gil_scoped_acquire held;
  std::string text;
  try {
    const auto source_line = py::module_::import("linecache").attr("getline");
    auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
    for (int i = 0; frame && !frame.is_none() && i < kMostFrames;
         ++i, frame = frame.attr("f_back")) {
      const auto code = frame.attr("f_code");
      const auto file = py::str(code.attr("co_filename")), name = py::str(code.attr("co_name"));
      const auto line = frame.attr("f_lineno");
      text +=
          py::str("  File \"{}\", line {}, in {}\n").format(file, line, name).cast<std::string>();
      const auto source = py::str(source_line(file, line).attr("strip")()).cast<std::string>();
      if (!source.empty()) text += "    " + source + "\n";
    }
  } catch (const py::error_already_set&) {
    return {};  // fall back to the C++ stack
  }
  return text;
}

const char* name_of_level(LogLevel level) {
  switch (level) {
    case LogLevel::error: return "error";
    case LogLevel::warning: return "warning";
    case LogLevel::info: return "info";
    case LogLevel::debug: return "debug";
    case LogLevel::trace: break;
  }
  return "trace";
}

using RecordTuple = std::tuple<std::string, std::optional<int>, double, py::str>;

std::vector<RecordTuple> take_records(int queue) {
  const auto taken = [queue] {
    const py::gil_scoped_release released;
    return take_log_records(queue);
  }();
  std::vector<RecordTuple> records;
  for (const LogRecord& each : taken) {
    // Names of others may be no UTF-8.
    auto text = py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(
        each.message.data(), static_cast<Py_ssize_t>(each.message.size()), "replace"));
    if (!text) throw py::error_already_set();
    records.emplace_back(name_of_level(each.level),
                         each.rank < 0 ? std::nullopt : std::optional(each.rank), each.time,
                         std::move(text));
  }
  return records;
}

}  // namespace

void bind_debug(py::module_& module) {
  group::set_caller_stack(&python_stack);
  py::enum_<DebugLevel>(module, "DebugLevel")
      .value("OFF", DebugLevel::OFF)
      .value("INFO", DebugLevel::INFO)
      .value("DETAIL", DebugLevel::DETAIL);
  module.def("get_debug_level", &get_debug_level,
             "DebugLevel: that of TORCH_DISTRIBUTED_DEBUG, or what was set.");
  module.def("set_debug_level", &set_debug_level, py::arg("level"),
             "OFF, INFO or DETAIL, for this process.");
  module.def("set_debug_level_from_env", &set_debug_level_from_env,
             "Reads TORCH_DISTRIBUTED_DEBUG again. Raises ValueError (DistArgumentError) for "
             "anything but OFF, INFO and "
             "DETAIL.");
  module.def("_begin_log_queue", &begin_log_queue, Released());
  module.def("_end_log_queue", &end_log_queue, Released());
  module.def("_take_log_records", &take_records, py::arg("queue"),
             "(level, rank, time, message) of each line: waits for some; none: it has ended.");
  module.def(
      "monitored_barrier",
      [](const Group& group, std::optional<Duration> timeout, bool wait_all_ranks) {
        blocking(group, [&] {
          monitored_barrier({.group = group, .timeout = timeout, .wait_all_ranks = wait_all_ranks});
        });
      },
      py::arg("group") = py::none(), py::arg("timeout") = py::none(),
      py::arg("wait_all_ranks") = false,
      "A barrier that says who is missing: rank 0 raises DistBackendError at the first rank that "
      "does not come within"
      " `timeout` (datetime.timedelta; None: the group's), or for all of them with wait_all_ranks; "
      "the others fail "
      "too.");
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
      "set_timeout", [](Duration timeout, const Group& group) { set_timeout(timeout, group); },
      py::arg("timeout"), py::arg("group") = py::none(),
      "Sets the timeout of the group's later calls in this process (None: the default group's): "
      "datetime.timedelta. Does nothing for a non-member's. Raises "
      "ValueError (DistArgumentError) before init_process_group.");
  module.def(
      "abort_process_group",
      [](const Group& group) { blocking(group, [&] { abort_process_group(group); }); },
      py::arg("group") = py::none(),
      "Ends what is in flight on the group (None: the default one), here and on the other members, "
      "whose calls raise "
      "naming this rank. Raises ValueError (DistArgumentError) before init_process_group.");
  module.def(
      "empty_shared",
      [](const std::vector<std::int64_t>& size, std::optional<at::ScalarType> dtype) {
        return empty_shared(size, dtype ? at::TensorOptions(*dtype) : at::TensorOptions());
      },
      py::arg("size"), py::arg("dtype") = py::none(), Released(),
      "A tensor (size: list of numbers; dtype None: torch's default) in memory that the other "
      "ranks of the host read "
      "where it is: its collectives copy less. Raises DistError where there is no room.");
  module.def("in_shared_memory", &in_shared_memory, py::arg("tensor"), Released(),
             "Whether the other ranks of the host can read the tensor where it is.");
  module.def(
      "use_shared_allocator",
      [](bool enabled, std::size_t private_up_to, std::optional<std::size_t> limit,
         std::size_t keep, bool read_only) {
        use_shared_allocator({.enabled = enabled,
                              .private_up_to = private_up_to,
                              .limit = limit,
                              .keep = keep,
                              .read_only = read_only});
      },
      py::arg("enabled") = true, py::arg("private_up_to") = SharedAllocatorOptions().private_up_to,
      py::arg("limit") = py::none(), py::arg("keep") = SharedAllocatorOptions().keep,
      py::arg("read_only") = false, Released(),
      "From now on torch's CPU tensors of this process lie where the other ranks of the host can "
      "read them. Sizes in bytes: private_up_to, "
      "of "
      "tensors that stay private; limit, of all (None: what the machine allows); keep, of freed "
      "memory. read_only: others map it for reading only.");
  module.def(
      "shared_allocator_stats",
      [] {
        const SharedAllocatorStats stats = shared_allocator_stats();
        py::dict all;
        all["enabled"] = stats.enabled;
        all["bytes_in_use"] = stats.bytes_in_use;
        all["bytes_reserved"] = stats.bytes_reserved;
        all["bytes_quarantined"] = stats.bytes_quarantined;
        all["limit"] = stats.limit;
        all["bytes_returned"] = stats.bytes_returned;
        all["allocations"] = stats.allocations;
        all["fallbacks"] = stats.fallbacks;
        return all;
      },
      "Counters of the shared allocator: a dict of counts, sizes in bytes.");
  module.def("trim_shared_allocator", &trim_shared_allocator, Released(),
             "Gives freed memory of the shared allocator back to the system.");
}

}  // namespace muster::python
