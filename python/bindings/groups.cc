#include <pybind11/chrono.h>
#include <pybind11/operators.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "bindings.h"
#include "blocking.h"
#include "muster/group/backend_name.h"
#include "muster/group/errors.h"
#include "muster/group/init.h"
#include "muster/group/reduce_op.h"
#include "muster/group/subgroups.h"
#include "muster/group/work.h"
#include "no_gil.h"

namespace muster::python {
namespace {

namespace py = pybind11;
using Limit = std::optional<Duration>;
using Text = std::optional<std::string>;

void bind_reduce_op(py::module_& module) {
  py::class_<ReduceOp> op(module, "ReduceOp", "How values are combined.");
  constexpr std::pair<const char*, ReduceOp::Kind> kKinds[] = {
      {"SUM", ReduceOp::SUM},   {"PRODUCT", ReduceOp::PRODUCT}, {"MIN", ReduceOp::MIN},   {"MAX", ReduceOp::MAX},
      {"BAND", ReduceOp::BAND}, {"BOR", ReduceOp::BOR},         {"BXOR", ReduceOp::BXOR}, {"AVG", ReduceOp::AVG}};
  for (const auto& [name, kind] : kKinds) op.attr(name) = ReduceOp(kind);
  op.def(py::self == py::self)
      .def("__hash__", [](const ReduceOp& self) { return static_cast<int>(self.kind()); })
      .def("__repr__", [](const ReduceOp& self) { return "<ReduceOp." + std::string(collective::name_of(self.engine())) + ">"; });
  module.def("_make_nccl_premul_sum", &ReduceOp::premul_sum, py::arg("factor"));
}

void bind_work(py::module_& module) {
  const auto without_gil_held = py::call_guard<py::gil_scoped_release>();
  const auto source_rank = [](const GroupWork& self) { return self.work->source_rank(); };
  py::class_<GroupWork, std::shared_ptr<GroupWork>>(module, "Work", "A started operation.")
      .def(
          "is_completed", [](const GroupWork& self) { return self.work->is_completed(); }, without_gil_held)
      .def(
          "is_success", [](const GroupWork& self) { return self.work->is_success(); }, without_gil_held)
      .def(
          "wait",
          [](const GroupWork& self, Limit timeout) {
            return without_gil([group = self.group] { interrupt(group.lock()); }, [&] { return self.work->wait(timeout); });
          },
          py::arg("timeout") = py::none())
      .def("get_future", [](const GroupWork& self) { return std::make_shared<torch::jit::PythonFutureWrapper>(self.work->get_future()); })
      .def("source_rank", source_rank)
      .def("_source_rank", source_rank)
      .def("result", [](const GroupWork& self) { return self.work->result(); })
      .def("exception", [](const GroupWork& self) -> py::object {
        const auto error = self.work->exception();
        if (!error) return py::none();
        try {
          std::rethrow_exception(error);
        } catch (const std::exception& thrown) {
          return py::str(thrown.what());
        }
      });
}

}  // namespace

void bind_groups(py::module_& module) {
  bind_reduce_op(module);
  bind_work(module);
  watch_for_interrupts();

  py::class_<ProcessGroup, Group>(module, "ProcessGroup", "A set of ranks that communicate. False where this process is no member.",
                                  let_go_without_gil<ProcessGroup>())
      .def("rank", &ProcessGroup::rank)
      .def("size", &ProcessGroup::size)
      .def_property_readonly("name", &ProcessGroup::name)
      .def("__bool__", &ProcessGroup::is_member)
      // Where torch has one value for every group that this process is no member of, programs compare with it.
      .def(
          "__eq__", [](const ProcessGroup& a, const ProcessGroup& b) { return &a == &b || (!a.is_member() && !b.is_member()); },
          py::is_operator())
      .def("__hash__", [](const ProcessGroup& self) { return std::hash<const void*>()(self.is_member() ? &self : nullptr); })
      .def("__repr__", [](const ProcessGroup& self) { return "<muster.ProcessGroup " + self.name() + ">"; });

  ProcessGroupParts none;
  none.name = "of others";
  module.attr("NON_GROUP_MEMBER") = std::make_shared<ProcessGroup>(std::move(none));

  module.def("parse_backend", [](const std::string& name) { return std::string(Backend(name).name()); });
  module.def("known_backends", &Backend::known);
  module.def("is_gloo_available", &is_gloo_available);
  module.def("is_mpi_available", &is_mpi_available);
  module.def("is_nccl_available", &is_nccl_available);
  module.def("is_ucc_available", &is_ucc_available);
  module.def("is_torchelastic_launched", &is_torchelastic_launched);

  module.def(
      "init_process_group",
      [](Text backend, Text init_method, Limit timeout, int world_size, int rank, std::shared_ptr<Store> store, std::string group_name,
         const py::object& pg_options, std::optional<bool> share_memory) {
        if (!pg_options.is_none()) group::invalid("init_process_group: pg_options is for backends that this build does not have");
        watch_for_interrupts();
        const InitProcessGroupOptions options{.backend = std::move(backend),
                                              .init_method = std::move(init_method),
                                              .timeout = timeout,
                                              .world_size = world_size,
                                              .rank = rank,
                                              .store = std::move(store),
                                              .group_name = std::move(group_name),
                                              .share_memory = share_memory};
        blocking_on_store([&] { init_process_group(options); });
      },
      py::arg("backend") = py::none(), py::arg("init_method") = py::none(), py::arg("timeout") = py::none(), py::arg("world_size") = -1,
      py::arg("rank") = -1, py::arg("store") = py::none(), py::arg("group_name") = "", py::arg("pg_options") = py::none(),
      py::arg("share_memory") = py::none());
  module.def(
      "destroy_process_group", [](const Group& group) { blocking(group, [&] { destroy_process_group(group); }); },
      py::arg("group") = py::none());
  module.def("is_initialized", &is_initialized);
  module.def("default_group", &default_group);
  module.def("get_rank", &get_rank, py::arg("group") = py::none());
  module.def("get_world_size", &get_world_size, py::arg("group") = py::none());
  module.def("get_backend", &get_backend, py::arg("group") = py::none());
  module.def("get_group_rank", &get_group_rank, py::arg("group"), py::arg("global_rank"));
  module.def("get_global_rank", &get_global_rank, py::arg("group"), py::arg("group_rank"));
  module.def("get_process_group_ranks", &get_process_group_ranks, py::arg("group"));

  module.def(
      "new_group",
      [](std::optional<std::vector<int>> ranks, Limit timeout, Text backend, const py::object& pg_options, bool use_local_synchronization) {
        if (!pg_options.is_none()) group::invalid("new_group: pg_options is for backends that this build does not have");
        const NewGroupOptions options{.ranks = Ranks(std::move(ranks)),
                                      .timeout = timeout,
                                      .backend = std::move(backend),
                                      .use_local_synchronization = use_local_synchronization};
        return blocking(nullptr, [&] { return new_group(options); });
      },
      py::arg("ranks") = py::none(), py::arg("timeout") = py::none(), py::arg("backend") = py::none(), py::arg("pg_options") = py::none(),
      py::arg("use_local_synchronization") = false);
  module.def(
      "split_group",
      [](const Group& parent, const std::vector<std::vector<int>>& split_ranks, Limit timeout) {
        return blocking(parent, [&] { return split_group(parent, split_ranks, {.timeout = timeout}); });
      },
      py::arg("parent_pg") = py::none(), py::arg("split_ranks"), py::arg("timeout") = py::none());
  module.def(
      "new_subgroups",
      [](std::optional<int> group_size, const Group& group, Limit timeout) {
        return blocking(group, [&] { return new_subgroups(group_size, {.group = group, .timeout = timeout}); });
      },
      py::arg("group_size") = py::none(), py::arg("group") = py::none(), py::arg("timeout") = py::none());
  module.def(
      "new_subgroups_by_enumeration",
      [](const std::vector<std::vector<int>>& ranks_per_subgroup_list, Limit timeout) {
        return blocking(nullptr, [&] { return new_subgroups_by_enumeration(ranks_per_subgroup_list, {.timeout = timeout}); });
      },
      py::arg("ranks_per_subgroup_list"), py::arg("timeout") = py::none());
  module.def(
      "shrink_group",
      [](const std::vector<int>& ranks_to_exclude, const Group& group, bool abort, Limit timeout) {
        const auto flags = abort ? ShrinkFlags::SHRINK_ABORT : ShrinkFlags::SHRINK_DEFAULT;
        return blocking(group, [&] { return shrink_group(ranks_to_exclude, {.group = group, .shrink_flags = flags, .timeout = timeout}); });
      },
      py::arg("ranks_to_exclude") = std::vector<int>{}, py::arg("group") = py::none(), py::arg("abort") = false,
      py::arg("timeout") = py::none());
}

}  // namespace muster::python
