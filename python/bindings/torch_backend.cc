// SPDX-License-Identifier: BSD-3-Clause
#include "faces/compat/torch_backend.h"

#include <pybind11/chrono.h>

#include <memory>
#include <utility>

#include "bindings.h"
#include "blocking.h"
#include "core/base/environment.h"
#include "core/group/call/tensor_class.h"
#include "core/group/errors.h"
#include "core/rendezvous/rendezvous.h"
#include "faces/compat/torch_job.h"
#include "faces/compat/torch_store.h"
#include "muster/init.h"
#include "muster/store.h"

namespace muster::python {
namespace {

/// Such an agent's workers find stock torch's store at MASTER_ADDR and MASTER_PORT; those of
/// `muster run` are told of one of muster's.
bool started_by_torchrun() {
  const auto theirs = env_flag("TORCHELASTIC_USE_AGENT_STORE");
  return theirs && theirs->value_or(false) && !env_text("MUSTER_AGENT_STORE");
}

/// A DTensor's shape is of the whole, and its memory is this process's part.
std::string describe_dtensor(const at::Tensor& tensor) {
  const pybind11::gil_scoped_acquire held;
  const pybind11::dict loaded = pybind11::module_::import("sys").attr("modules");
  if (!loaded.contains("torch.distributed.tensor")) return {};
  const pybind11::object kind = loaded["torch.distributed.tensor"].attr("DTensor");
  if (!pybind11::isinstance(pybind11::cast(tensor), kind)) return {};
  return "is a DTensor, of which this rank has a part only; give its to_local(), or call "
         "redistribute() or full_tensor() of it instead";
}

/// Muster's group below torch's object over it, where a group of muster's is expected: a mesh that
/// torch's functions take gives such objects. New reference; null: `given` is no group of torch's.
PyObject* group_below(PyObject* given, PyTypeObject* /*wanted*/) {
  const pybind11::dict loaded = pybind11::module_::import("sys").attr("modules");
  if (!loaded.contains("torch.distributed")) return nullptr;
  const pybind11::object kind = loaded["torch.distributed"].attr("ProcessGroup");
  if (!pybind11::isinstance(pybind11::handle(given), kind)) return nullptr;
  pybind11::object below = pybind11::none();
  if (loaded.contains("muster._torch_groups"))
    below = loaded["muster._torch_groups"].attr("muster_group")(pybind11::handle(given));
  if (below.is_none())
    group::invalid(
        "the group is torch.distributed's own, or was muster's and has ended: give one of "
        "muster.new_group(), or get_group() of a mesh of muster.init_device_mesh()");
  return below.release().ptr();
}

}  // namespace

void meet_by_torchrun(InitProcessGroupOptions& options) {
  if (options.store || options.init_method.value_or("env://") != "env://" || !started_by_torchrun())
    return;
  pybind11::dict limit;
  if (options.timeout) limit["timeout"] = *options.timeout;
  const auto rendezvous = pybind11::module_::import("torch.distributed").attr("rendezvous");
  const pybind11::tuple met =
      rendezvous("env://", options.rank, options.world_size, **limit).attr("__next__")();
  const auto store = met[0].cast<c10::intrusive_ptr<c10d::Store>>();
  options.rank = met[1].cast<int>();
  options.world_size = met[2].cast<int>();
  const auto timeout = options.timeout.value_or(store::RendezvousOptions().timeout);
  auto own = blocking_on_store(
      [&] { return compat::meet_on(store, options.rank, options.world_size, timeout); });
  if (!own.ok()) group::raise_from_store(own.status().with_context("init_process_group"));
  options.store = std::make_shared<Store>(std::move(own).value());
  options.init_method.reset();
}

void bind_torch_backend(pybind11::module_& module) {
  group::set_foreign_class(&describe_dtensor);
  // torch creates backends with the function below. This is for programs that construct a
  // ProcessGroupGloo themselves.
  using Backend = compat::TorchBackend;
  pybind11::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(
      module, "ProcessGroupMuster",
      "A backend of stock torch, made as its ProcessGroupGloo is: by ranks that share `store`, "
      "each of which blocks until all `size` have\n"
      "come. It has an engine of its own. `shutdown()` waits for the other ranks; a rank that "
      "drops it without fails those that still "
      "call.")
      .def(pybind11::init([](c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                             std::chrono::milliseconds timeout) {
             return Backend::create({.backend = "muster",
                                     .store = std::move(store),
                                     .rank = rank,
                                     .size = size,
                                     .timeout = timeout,
                                     .id = "ProcessGroupMuster",
                                     .alone = true});
           }),
           pybind11::arg("store"), pybind11::arg("rank"), pybind11::arg("size"),
           pybind11::arg("timeout") = std::chrono::milliseconds(kBackendDefaultTimeout),
           pybind11::call_guard<pybind11::gil_scoped_release>())
      .def_property_readonly("_group", &Backend::group)
      .def(
          "allocate_tensor",
          [](Backend& self, std::int64_t size, at::ScalarType dtype, c10::Device device) {
            return self.allocate_shared(size, at::TensorOptions(dtype).device(device));
          },
          pybind11::arg("size"), pybind11::kw_only(), pybind11::arg("dtype"),
          pybind11::arg("device"), pybind11::call_guard<pybind11::gil_scoped_release>());
  pybind11::detail::get_type_info(typeid(ProcessGroup), true)
      ->implicit_conversions.emplace_back(&group_below);
  module.def(
      "create_torch_backend",
      [](std::string backend, c10::intrusive_ptr<c10d::Store> store, int rank, int size,
         std::chrono::milliseconds timeout, std::string id,
         std::vector<int> global_ranks) -> c10::intrusive_ptr<c10d::Backend> {
        return compat::TorchBackend::create({std::move(backend), std::move(store), rank, size,
                                             timeout, std::move(id), std::move(global_ranks)});
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def(
      "_torch_backend_over",
      [](Group group) -> c10::intrusive_ptr<c10d::Backend> {
        return compat::TorchBackend::over(std::move(group));
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
