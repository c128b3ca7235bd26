// SPDX-License-Identifier: BSD-3-Clause
#include "muster/spawn.h"

#include "bindings.h"
#include "core/group/world.h"
#include "core/transport/failure/process_failure.h"
#include "muster/rpc_calls.h"

namespace muster::python {
namespace {

namespace py = pybind11;

/// On Ctrl-C during a spawn of threads, aborts the operations in which the ranks wait. Thread-safe.
class RunningRanks {
 public:
  void add(std::shared_ptr<World> scope) {
    const std::lock_guard lock(mutex_);
    scopes_.push_back(std::move(scope));
  }
  void abort() {
    const std::lock_guard lock(mutex_);
    for (const auto& scope : scopes_) scope->abort("interrupted (SIGINT)");
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<World>> scopes_;
};

std::string traceback_of(const py::error_already_set& error) {
  try {
    const auto lines = py::module_::import("traceback")
                           .attr("format_exception")(error.type(), error.value(), error.trace());
    return py::str("").attr("join")(lines).cast<std::string>();
  } catch (const py::error_already_set&) {
    return error.what();
  }
}

/// For the errors of the other ranks: "ValueError: bad batch (train.py:33)", and the ranks whose
/// failure led to this one.
std::pair<std::string, std::vector<int>> brief_of(const py::error_already_set& error) {
  try {
    const auto failure = py::module_::import("muster._failure");
    if (error.trace()) error.value().attr("with_traceback")(error.trace());
    return {failure.attr("describe")(error.value()).cast<std::string>(),
            failure.attr("earlier")(error.value()).cast<std::vector<int>>()};
  } catch (const py::error_already_set&) {
    return {error.what(), {}};
  }
}

/// `fn(rank, *args)` on a rank's thread. An exception is converted to text with its traceback, so
/// that it no longer needs the GIL.
void run(const py::function& fn, const py::tuple& args, int rank) {
  const py::gil_scoped_acquire held;
  try {
    fn(rank, *args);
  } catch (const py::error_already_set& error) {
    auto [brief, earlier] = brief_of(error);
    throw group::RankFailure(traceback_of(error), std::move(brief), std::move(earlier), rank);
  }
}

}  // namespace

void bind_spawn(py::module_& module) {
  module.def("note_failure", &transport::note_process_failure);
  module.def("note_exception", &transport::note_process_exception);
  module.def("note_trouble", &transport::note_process_trouble);
  module.def(
      "tell_failure", [] { transport::tell_process_failure(); },
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "leave_groups",
      [] {
        // A child may have been forked while another thread held their locks.
        if (!World::current().opened_here()) return;
        transport::leave_process_jobs();
        World::current().drop();
      },
      py::call_guard<py::gil_scoped_release>());
  module.def("spawn_threads", [](const py::function& fn, const py::tuple& args, int nprocs) {
    RunningRanks running;
    std::unique_ptr<SpawnContext> context;
    const auto body = [&](int rank) {
      running.add(World::hold_current());
      const rpc::RpcScope::Binding scope(std::make_shared<rpc::RpcScope>());
      run(fn, args, rank);
    };
    const auto finished = [&] {
      const py::gil_scoped_release released;
      if (!context)
        context = spawn(body, {.nprocs = nprocs, .join = false, .mode = SpawnMode::threads});
      return context->join(std::chrono::milliseconds(100));
    };
    // Python's signal handlers run between two polls; other waits of this process are not woken.
    while (!finished()) {
      if (PyErr_CheckSignals() == 0) continue;
      const py::error_already_set interrupt;
      {
        const py::gil_scoped_release released;
        running.abort();
        try {
          context->join();
        } catch (const DistError&) {
        }
      }
      throw interrupt;
    }
  });
}

}  // namespace muster::python
