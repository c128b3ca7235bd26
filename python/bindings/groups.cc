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
#include "pg_options.h"

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
  module.def("_make_nccl_premul_sum", &ReduceOp::premul_sum, py::arg("factor"),
             "A ReduceOp: each rank's input times its factor, then summed.");
}

void bind_work(py::module_& module) {
  const auto without_gil_held = py::call_guard<py::gil_scoped_release>();
  const auto source_rank = [](const GroupWork& self) { return self.work->source_rank(); };
  py::class_<GroupWork, std::shared_ptr<GroupWork>>(module, "Work", "A started operation.")
      .def(
          "is_completed", [](const GroupWork& self) { return self.work->is_completed(); }, without_gil_held,
          "Whether it has ended, well or badly. Never blocks.")
      .def(
          "is_success", [](const GroupWork& self) { return self.work->is_success(); }, without_gil_held, "Whether it has ended well.")
      .def(
          "wait",
          [](const GroupWork& self, Limit timeout) {
            return without_gil([group = self.group] { interrupt(group.lock()); }, [&] { return self.work->wait(timeout); });
          },
          py::arg("timeout") = py::none(),
          "Returns True once it is completed; raises what it failed with, and DistBackendError (`timed out`) when "
          "`timeout` (datetime.timedelta) passes first.")
      .def(
          "get_future", [](const GroupWork& self) { return std::make_shared<torch::jit::PythonFutureWrapper>(self.work->get_future()); },
          "torch.futures.Future of the list of output tensors.")
      .def("source_rank", source_rank, "Receives, once completed: the rank that sent. -1 for other operations.")
      .def("_source_rank", source_rank)
      .def(
          "result", [](const GroupWork& self) { return self.work->result(); }, "The output tensors.")
      .def(
          "exception",
          [](const GroupWork& self) -> py::object {
            const auto error = self.work->exception();
            if (!error) return py::none();
            try {
              std::rethrow_exception(error);
            } catch (const std::exception& thrown) {
              return py::str(thrown.what());
            }
          },
          "What it failed with, as text; None while it has not.");
}

}  // namespace

void bind_groups(py::module_& module) {
  bind_reduce_op(module);
  bind_work(module);
  watch_for_interrupts();
  module.def("main_thread_is_interruptible", &main_thread_is_interruptible, "Whether the main thread is in a call that Ctrl-C ends.");

  py::class_<ProcessGroup, Group>(module, "ProcessGroup", "A set of ranks that communicate. False where this process is no member.",
                                  let_go_without_gil<ProcessGroup>())
      .def("rank", &ProcessGroup::rank, "This process's rank in it; -1 for a non-member.")
      .def("size", &ProcessGroup::size, "The number of members; -1 for a non-member.")
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

  auto nccl = py::class_<ProcessGroupNCCL>(module, "ProcessGroupNCCL", "What belongs to the nccl backend.");
  py::class_<ProcessGroupNCCL::Options, std::shared_ptr<ProcessGroupNCCL::Options>>(
      nccl, "Options", "pg_options of the nccl backend: is_high_priority_stream, whether its kernels run on CUDA streams of high priority.")
      .def(py::init<bool>(), py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &ProcessGroupNCCL::Options::is_high_priority_stream);

  module.def("parse_backend", [](const std::string& name) { return std::string(Backend(name).name()); });
  module.def("known_backends", &Backend::known);
  module.def("is_gloo_available", &is_gloo_available, "True: `gloo` is another name for the native engine.");
  module.def("is_mpi_available", &is_mpi_available, "Whether this build has the mpi backend.");
  module.def("is_nccl_available", &is_nccl_available, "Whether this build has the nccl backend.");
  module.def("is_ucc_available", &is_ucc_available, "Whether this build has the ucc backend.");
  module.def("is_torchelastic_launched", &is_torchelastic_launched, "Whether TORCHELASTIC_RUN_ID is set, as the launcher does.");

  module.def(
      "init_process_group",
      [](Text backend, Text init_method, Limit timeout, int world_size, int rank, std::shared_ptr<Store> store, std::string group_name,
         const py::object& pg_options, std::optional<bool> share_memory) {
        watch_for_interrupts();
        InitProcessGroupOptions options{.backend = std::move(backend),
                                        .init_method = std::move(init_method),
                                        .timeout = timeout,
                                        .world_size = world_size,
                                        .rank = rank,
                                        .store = std::move(store),
                                        .group_name = std::move(group_name),
                                        .pg_options = pg_options_of(pg_options),
                                        .share_memory = share_memory};
        meet_by_torchrun(options);
        blocking_on_store([&] { init_process_group(options); });
      },
      py::arg("backend") = py::none(), py::arg("init_method") = py::none(), py::arg("timeout") = py::none(), py::arg("world_size") = -1,
      py::arg("rank") = -1, py::arg("store") = py::none(), py::arg("group_name") = "", py::arg("pg_options") = py::none(),
      py::arg("share_memory") = py::none(),
      "Makes the default group; blocks until every rank has joined. backend: a name, or as `cpu:native,cuda:nccl`; "
      "None: native for CPU tensors. init_method: an URL (`env://`, `tcp://host:port`, `file:///path`), `env://` "
      "where there is neither it nor a store; store: with rank and world_size. timeout: datetime.timedelta, of this "
      "and of the group's calls; None: 30 minutes. group_name keeps jobs apart that share one address. pg_options: "
      "for a registered backend or nccl. share_memory: torch's CPU tensors lie where the other ranks of the host can read them; None: as "
      "the environment says. Raises DistStoreError naming the ranks that did not come, DistNetworkError "
      "for addresses, ValueError (DistArgumentError) for arguments and for a second call.");
  module.def(
      "destroy_process_group", [](const Group& group) { blocking(group, [&] { destroy_process_group(group); }); },
      py::arg("group") = py::none(),
      "Ends one group, or all of them for None and the default one; every member calls it. Raises what a member "
      "called and another skipped, and a failure that no call has shown yet, after everything is taken down.");
  module.def("is_initialized", &is_initialized, "Whether this process (or thread, where ranks are threads) has a default group.");
  module.def("default_group", &default_group);
  module.def("get_rank", &get_rank, py::arg("group") = py::none(),
             "This process's rank in the group (None: the default one); -1 for a non-member.");
  module.def("get_world_size", &get_world_size, py::arg("group") = py::none(), "The number of members; -1 for a non-member.");
  module.def("get_backend", &get_backend, py::arg("group") = py::none(),
             "The lower-case name that the group's backend was asked for by; `cpu:native` where none was. Members only.");
  module.def("get_group_rank", &get_group_rank, py::arg("group"), py::arg("global_rank"),
             "From a rank of the default group to one of `group`. Raises ValueError (DistArgumentError) for a non-member.");
  module.def("get_global_rank", &get_global_rank, py::arg("group"), py::arg("group_rank"),
             "From a rank of `group` to one of the default group. Raises ValueError (DistArgumentError) for a rank that it "
             "has not.");
  module.def("get_process_group_ranks", &get_process_group_ranks, py::arg("group"),
             "The members, as ranks of the default group, in the group's order.");

  module.def(
      "new_group",
      [](std::optional<std::vector<int>> ranks, Limit timeout, Text backend, const py::object& pg_options, bool use_local_synchronization,
         const Text&) {
        const NewGroupOptions options{.ranks = Ranks(std::move(ranks)),
                                      .timeout = timeout,
                                      .backend = std::move(backend),
                                      .pg_options = pg_options_of(pg_options),
                                      .use_local_synchronization = use_local_synchronization};
        return blocking(nullptr, [&] { return new_group(options); });
      },
      py::arg("ranks") = py::none(), py::arg("timeout") = py::none(), py::arg("backend") = py::none(), py::arg("pg_options") = py::none(),
      py::arg("use_local_synchronization") = false, py::arg("group_desc") = py::none(),
      "A group of some ranks (of the default group; None: all), in sorted order. All ranks call it, in the same "
      "order; with use_local_synchronization only its members. A process that is no member gets a group that is "
      "false. Raises DistBackendError on all where calls differ, naming both. group_desc is taken for torch's sake.");
  module.def(
      "split_group",
      [](const Group& parent, const std::optional<std::vector<std::vector<int>>>& split_ranks, Limit timeout, const py::object& pg_options,
         const Text&, Text backend) {
        if (!split_ranks) group::invalid("split_group: split_ranks is missing: give a list of lists of ranks of the parent");
        const SplitGroupOptions options{.timeout = timeout, .backend = std::move(backend), .pg_options = pg_options_of(pg_options)};
        return blocking(parent, [&] { return split_group(parent, *split_ranks, options); });
      },
      py::arg("parent_pg") = py::none(), py::arg("split_ranks") = py::none(), py::arg("timeout") = py::none(),
      py::arg("pg_options") = py::none(), py::arg("group_desc") = py::none(), py::arg("backend") = py::none(),
      "Divides a group (None: the default one) by lists of its ranks, which must not overlap; each member gets the "
      "group of its list, a false one where it is in none. Every member calls it with the same lists. group_desc is "
      "taken for torch's sake.");
  module.def(
      "new_subgroups",
      [](std::optional<int> group_size, const Group& group, Limit timeout, Text backend, const py::object& pg_options, const Text&) {
        const NewSubgroupsOptions options{
            .group = group, .timeout = timeout, .backend = std::move(backend), .pg_options = pg_options_of(pg_options)};
        return blocking(group, [&] { return new_subgroups(group_size, options); });
      },
      py::arg("group_size") = py::none(), py::arg("group") = py::none(), py::arg("timeout") = py::none(), py::arg("backend") = py::none(),
      py::arg("pg_options") = py::none(), py::arg("group_desc") = py::none(),
      "Groups of `group_size` consecutive ranks (None: one group per host): this process's own, and the list of all. "
      "Raises ValueError (DistArgumentError) where the number of ranks is not a multiple.");
  module.def(
      "new_subgroups_by_enumeration",
      [](const std::vector<std::vector<int>>& ranks_per_subgroup_list, Limit timeout, Text backend, const py::object& pg_options,
         const Text&) {
        const NewSubgroupsOptions options{.timeout = timeout, .backend = std::move(backend), .pg_options = pg_options_of(pg_options)};
        return blocking(nullptr, [&] { return new_subgroups_by_enumeration(ranks_per_subgroup_list, options); });
      },
      py::arg("ranks_per_subgroup_list"), py::arg("timeout") = py::none(), py::arg("backend") = py::none(),
      py::arg("pg_options") = py::none(), py::arg("group_desc") = py::none(),
      "Groups of the listed ranks of the default group, which must not overlap: this process's own, and the list of "
      "all.");
  module.def(
      "shrink_group",
      [](const std::vector<int>& ranks_to_exclude, const Group& group, int shrink_flags, const py::object& pg_options, Limit timeout) {
        const auto flags = shrink_flags != 0 ? ShrinkFlags::SHRINK_ABORT : ShrinkFlags::SHRINK_DEFAULT;
        const ShrinkGroupOptions options{
            .group = group, .shrink_flags = flags, .timeout = timeout, .pg_options = pg_options_of(pg_options)};
        return blocking(group, [&] { return shrink_group(ranks_to_exclude, options); });
      },
      py::arg("ranks_to_exclude") = std::vector<int>{}, py::arg("group") = py::none(), py::arg("shrink_flags") = 0,
      py::arg("pg_options") = py::none(), py::arg("timeout") = py::none(),
      "A group of those members that are left: without the listed ranks of the group, and without those that have "
      "died or die meanwhile. Every survivor calls it. shrink_flags: SHRINK_ABORT ends first what is in flight. Where"
      " the default group is shrunk, the new one takes its place, with ranks from 0.");
}

}  // namespace muster::python
