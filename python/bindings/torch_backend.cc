#include "muster/compat/torch_backend.h"

#include <pybind11/chrono.h>

#include <utility>

#include "bindings.h"
#include "muster/compat/torch_job.h"

namespace muster::python {

void bind_torch_backend(pybind11::module_& module) {
  module.def(
      "create_torch_backend",
      [](std::string backend, c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout, std::string id,
         std::vector<int> global_ranks) -> c10::intrusive_ptr<c10d::Backend> {
        return compat::TorchBackend::create(
            {std::move(backend), std::move(store), rank, size, timeout, std::move(id), std::move(global_ranks)});
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def(
      "leave_torch_job",
      [](std::chrono::milliseconds limit) {
        if (const auto job = compat::TorchJob::of_default_group()) job->close(limit);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace muster::python
