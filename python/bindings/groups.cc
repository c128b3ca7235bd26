// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/DeviceAccelerator.h>
#include <pybind11/chrono.h>

#include <map>
#include <memory>
#include <variant>

#include "bindings.h"
#include "blocking.h"
#include "core/group/call/call.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "core/group/world.h"
#include "faces/compat/torch_store.h"
#include "muster/backend_name.h"
#include "muster/init.h"
#include "muster/store.h"
#include "muster/subgroups.h"
#include "no_gil.h"
#include "pg_options.h"
#include "python_store.h"
#include "rpc/functions.h"

namespace muster::python {
namespace {

namespace py = pybind11;
using Limit = std::optional<Duration>;
using Text = std::optional<std::string>;
using DeviceId = std::optional<std::variant<int, at::Device>>;
using AnyStore = std::variant<std::shared_ptr<Store>, c10::intrusive_ptr<c10d::Store>>;

/// torch's device_id: what a group of accelerators is made for, ahead of its tensors. Throws if
/// there is no such device; empty for a CPU, which nothing connects.
std::optional<at::Device> device_of(const DeviceId& given, const std::string& call) {
  if (!given) return {};
  const auto accelerator = at::getAccelerator(false);
  const auto* number = std::get_if<int>(&*given);
  if (number != nullptr && !accelerator)
    group::invalid(call + ": device_id is a number, and this torch has no accelerator");
  const auto device = number != nullptr
                          ? at::Device(*accelerator, static_cast<at::DeviceIndex>(*number))
                          : std::get<at::Device>(*given);
  if (!device.has_index())
    group::invalid(call + ": device_id " + device.str() +
                   " has no index; give one, as cpu:0 or cuda:0");
  if (device.is_cpu()) return {};
  if (device.type() != accelerator)
    group::invalid(call + ": device_id " + device.str() + " is none of this torch's accelerators");
  if (const auto there = at::accelerator::deviceCount(); device.index() >= there)
    group::invalid(call + ": device_id " + device.str() + " is out of range: this machine has " +
                   std::to_string(there) + " of that kind");
  return device;
}

std::shared_ptr<Store> store_of(const AnyStore& given) {
  if (const auto* own = std::get_if<std::shared_ptr<Store>>(&given)) return kept_store(*own);
  // The caller may block on the store from another thread; a clone has its own connection.
  return std::make_shared<Store>(
      compat::adapt_store(std::get<c10::intrusive_ptr<c10d::Store>>(given)->clone()));
}

/// Properties that a program attached to a group. Muster itself does not use them.
struct Notes {
  Text description;
  std::optional<at::Device> device;
};

/// Guarded by the GIL.
std::map<std::weak_ptr<ProcessGroup>, Notes, std::owner_less<>>& notes() {
  static auto* all = new std::map<std::weak_ptr<ProcessGroup>, Notes, std::owner_less<>>;
  return *all;
}

Notes& notes_on(const Group& group) {
  std::erase_if(notes(), [](const auto& each) { return each.first.expired(); });
  return notes()[group];
}

Group described(Group group, const Text& group_desc) {
  if (group_desc) notes_on(group).description = group_desc;
  return group;
}

void bind_device(const Group& group, const DeviceId& device_id) {
  if (device_id && std::holds_alternative<at::Device>(*device_id))
    notes_on(group).device = std::get<at::Device>(*device_id);
}

using Divided = std::pair<Group, std::vector<Group>>;
Divided described(Divided groups, const Text& group_desc) {
  for (const auto& each : groups.second) described(each, group_desc);
  return groups;
}

std::string description_of(const Group& group) {
  const auto at = notes().find(group);
  if (at != notes().end() && at->second.description) return *at->second.description;
  const py::gil_scoped_release released;
  return is_initialized() && group == default_group() ? "default_pg" : "undefined";
}

PrefixStore store_of_group(const ProcessGroup& self) {
  const auto job = core_of(self).store();
  if (job == nullptr)
    throw DistStoreError("group " + self.name() + " has no store: its job has ended");
  return {"groups/" + self.name(), std::make_shared<Store>(job)};
}

/// Passes a group's calls to the methods `call`, `submitted` and `aborted` of a Python object.
class PythonObserver final : public CallObserver {
 public:
  explicit PythonObserver(py::object hooks) : hooks_(kept(std::move(hooks))) {}
  const py::object& hooks() const { return *hooks_; }

  std::uint64_t on_call(const Call& call) override {
    const py::gil_scoped_acquire held;
    const bool has_root = !call.is_message() && call.args.root >= 0;
    return hooks_
        ->attr("call")(call.name(), flat(call.inputs()), flat(call.outputs()), call.is_async(),
                       has_root ? call.args.root : -1)
        .cast<std::uint64_t>();
  }
  void on_submitted(const Call& call, std::uint64_t number, const WorkRef& work) override {
    const py::gil_scoped_acquire held;
    std::shared_ptr<GroupWork> shown;
    if (work != nullptr)
      shown = std::make_shared<GroupWork>(GroupWork{work, call.group().shared_from_this()});
    hooks_->attr("submitted")(number, call.name(), call.is_async(), shown);
  }
  /// Python reports what a hook raises here as "Exception ignored", since the abort must go on.
  void on_abort() noexcept override {
    if (is_python_ending()) return;
    const py::gil_scoped_acquire held;
    try {
      hooks_->attr("aborted")();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("an abort hook of muster.ProcessGroup");
    }
  }

 private:
  static std::vector<at::Tensor> flat(const Slices& slices) {
    std::vector<at::Tensor> tensors;
    for (const Slice& slice : slices) tensors.insert(tensors.end(), slice.begin(), slice.end());
    return tensors;
  }

  const std::shared_ptr<py::object> hooks_;
};

py::object hooks_of(const ProcessGroup& self) {
  const auto* const observer = dynamic_cast<const PythonObserver*>(core_of(self).observer());
  return observer == nullptr ? py::object(py::none()) : observer->hooks();
}

void set_hooks(ProcessGroup& self, py::object hooks) {
  core_of(self).observe(std::make_shared<PythonObserver>(std::move(hooks)));
}

/// torch's objects over muster's groups (_torch_groups.py) end with them.
void forget_torch_groups(const Group& group) {
  const py::dict loaded = py::module_::import("sys").attr("modules");
  if (loaded.contains("muster._torch_groups")) loaded["muster._torch_groups"].attr("forget")(group);
}

/// As `destroy_process_group`, but an exception that is under way stays the one that the program
/// sees.
void destroy_beside_exceptions(const Group& group) {
  forget_torch_groups(is_initialized() && group == default_group() ? nullptr : group);
  const py::object under_way = py::module_::import("sys").attr("exc_info")().cast<py::tuple>()[1];
  if (!py::isinstance(under_way, py::handle(PyExc_Exception)))
    return blocking(group, [&] { destroy_process_group(group); });
  try {
    blocking(group, [&] { destroy_process_group(group); });
  } catch (const DistError& error) {
    const std::string text = std::string("destroy_process_group: ") + error.what();
    if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) != 0) throw py::error_already_set();
  }
}

}  // namespace

void describe_group(const Group& group, const std::string& description) {
  if (description_of(group) == "undefined") notes_on(group).description = description;
}

void bind_groups(py::module_& module) {
  bind_reduce_op(module);
  bind_work(module);
  watch_for_interrupts();
  module.def("main_thread_is_interruptible", &main_thread_is_interruptible,
             "Whether the main thread is in a call that Ctrl-C ends.");

  py::class_<ProcessGroup, Group>(
      module, "ProcessGroup",
      "A set of ranks that communicate. False where this process is no member.",
      let_go_without_gil<ProcessGroup>())
      .def("rank", &ProcessGroup::rank, "This process's rank in it; -1 for a non-member.")
      .def("size", &ProcessGroup::size, "The number of members; -1 for a non-member.")
      .def(
          "name",
          [](const ProcessGroup& self) {
            return self.backend().empty() ? std::string(Backend::UNDEFINED) : self.backend();
          },
          "The name that its backend was asked for by, as get_backend.")
      .def_property_readonly("group_name", &ProcessGroup::name, "Its name in errors and traces.")
      .def_property_readonly(
          "group_desc", &description_of,
          "The description that it was made with; of the default group `default_pg`, else "
          "`undefined`.")
      .def(
          "_set_group_desc",
          [](const Group& self, std::string description) {
            notes_on(self).description = std::move(description);
          },
          py::arg("group_desc"), "Sets `group_desc`.")
      .def_property(
          "bound_device_id",
          [](const Group& self) {
            const auto at = notes().find(self);
            return at == notes().end() ? std::nullopt : at->second.device;
          },
          [](const Group& self, std::optional<at::Device> device) {
            notes_on(self).device = device;
          },
          "The device_id it was made with, or None. Muster uses the tensors' devices instead.")
      .def_property_readonly("timeout", &ProcessGroup::timeout,
                             "Timeout of calls that give none: datetime.timedelta.")
      .def("get_group_store", &store_of_group,
           "A part of the job's store for this group's keys. Raises DistStoreError if the job has "
           "ended.")
      .def(
          "_get_sequence_number_for_group",
          [](const ProcessGroup& self) { return core_of(self).collective_count(); },
          "Number of collectives this member has submitted.")
      .def_property("_hooks", &hooks_of, &set_hooks,
                    "The observer of its calls (hooks.py), or None; can be set once.")
      .def(
          "_show_calls", [](ProcessGroup& self, bool shown) { core_of(self).show_calls(shown); },
          py::arg("shown"), "Whether the observer sees calls.")
      .def("__bool__", &ProcessGroup::is_member)
      // torch has a single value for all groups without this process, and programs compare with it.
      .def(
          "__eq__",
          [](const ProcessGroup& a, const ProcessGroup& b) {
            return &a == &b || (!a.is_member() && !b.is_member());
          },
          py::is_operator())
      .def("__hash__",
           [](const ProcessGroup& self) {
             return std::hash<const void*>()(self.is_member() ? &self : nullptr);
           })
      .def("__repr__",
           [](const ProcessGroup& self) { return "<muster.ProcessGroup " + self.name() + ">"; });

  ProcessGroupParts none;
  none.name = "of others";
  module.attr("NON_GROUP_MEMBER") = Group(std::make_shared<GroupCore>(std::move(none)));

  auto nccl =
      py::class_<ProcessGroupNCCL>(module, "ProcessGroupNCCL", "Names of the nccl backend.");
  using Config = ProcessGroupNCCL::NCCLConfig;
  py::class_<Config>(nccl, "NCCLConfig",
                     "What NCCL is told of a group's communicators; None: NCCL's own choice.")
      .def(py::init<>())
      .def_readwrite("blocking", &Config::blocking)
      .def_readwrite("cga_cluster_size", &Config::cga_cluster_size)
      .def_readwrite("min_ctas", &Config::min_ctas)
      .def_readwrite("max_ctas", &Config::max_ctas)
      .def_readwrite("net_name", &Config::net_name)
      .def_readwrite("split_share", &Config::split_share)
      .def_readwrite("traffic_class", &Config::traffic_class)
      .def_readwrite("comm_name", &Config::comm_name)
      .def_readwrite("collnet_enable", &Config::collnet_enable)
      .def_readwrite("cta_policy", &Config::cta_policy)
      .def_readwrite("shrink_share", &Config::shrink_share)
      .def_readwrite("nvls_ctas", &Config::nvls_ctas);
  py::class_<ProcessGroupNCCL::Options, std::shared_ptr<ProcessGroupNCCL::Options>>(
      nccl, "Options",
      "pg_options of the nccl backend: is_high_priority_stream, whether its kernels run on CUDA "
      "streams of high priority, and config, what NCCL is told of its communicators.")
      .def(py::init<bool>(), py::arg("is_high_priority_stream") = false)
      .def_readwrite("config", &ProcessGroupNCCL::Options::config)
      .def_readwrite("is_high_priority_stream",
                     &ProcessGroupNCCL::Options::is_high_priority_stream);

  module.def("parse_backend",
             [](const std::string& name) { return std::string(Backend(name).name()); });
  module.def("known_backends", &Backend::known);
  module.def("is_gloo_available", &is_gloo_available,
             "True: `gloo` is another name for the native engine.");
  module.def("is_mpi_available", &is_mpi_available, "Whether this build has the mpi backend.");
  module.def(
      "is_nccl_available", &is_nccl_available,
      "Whether the nccl backend can be used: NCCL's library can be loaded. A GPU is needed too.");
  module.def("is_ucc_available", &is_ucc_available, "Whether this build has the ucc backend.");
  module.def("is_torchelastic_launched", &is_torchelastic_launched,
             "Whether TORCHELASTIC_RUN_ID is set, as the launcher does.");

  module.def(
      "init_process_group",
      [](Text backend, Text init_method, Limit timeout, int world_size, int rank,
         const AnyStore& store, std::string group_name, const py::object& pg_options,
         const DeviceId& device_id, const std::optional<std::vector<int>>&, bool enable_reconfigure,
         std::optional<bool> share_memory, Limit heartbeat_timeout) {
        if (enable_reconfigure)
          group::invalid(
              "init_process_group: muster has no enable_reconfigure; shrink_group goes on without "
              "ranks that are lost");
        watch_for_interrupts();
        InitProcessGroupOptions options{.backend = std::move(backend),
                                        .init_method = std::move(init_method),
                                        .timeout = timeout,
                                        .world_size = world_size,
                                        .rank = rank,
                                        .store = store_of(store),
                                        .group_name = std::move(group_name),
                                        .pg_options = pg_options_of(pg_options),
                                        .device_id = device_of(device_id, "init_process_group"),
                                        .share_memory = share_memory,
                                        .heartbeat_timeout = heartbeat_timeout};
        meet_by_torchrun(options);
        const Group world = blocking_on_store([&] {
          init_process_group(options);
          return default_group();
        });
        bind_device(world, device_id);
      },
      py::arg("backend") = py::none(), py::arg("init_method") = py::none(),
      py::arg("timeout") = py::none(), py::arg("world_size") = -1, py::arg("rank") = -1,
      py::arg("store") = py::none(), py::arg("group_name") = "", py::arg("pg_options") = py::none(),
      py::arg("device_id") = py::none(), py::arg("_ranks") = py::none(),
      py::arg("enable_reconfigure") = false, py::arg("share_memory") = py::none(),
      py::arg("heartbeat_timeout") = py::none(),
      "Makes the default group; blocks until every rank has joined. backend: a name, or as "
      "`cpu:native,cuda:nccl`; "
      "None: native for CPU tensors. init_method: an URL (`env://`, `tcp://host:port`, "
      "`file:///path`), `env://` "
      "where there is neither it nor a store; store: with rank and world_size, torch.distributed's "
      "are taken too. timeout: "
      "datetime.timedelta, of this "
      "and of the group's calls; None: 30 minutes. group_name keeps jobs apart that share one "
      "address. pg_options: "
      "for a registered backend or nccl. device_id: a torch.device with an index, or the number of "
      "a GPU, on every rank or on none: nccl connects the ranks at once. _ranks is taken for "
      "torch's sake; enable_reconfigure raises. share_memory: "
      "torch's CPU tensors lie where the other ranks "
      "of the host can read them; None: as "
      "the environment says. heartbeat_timeout: datetime.timedelta for which a rank of another "
      "host "
      "may be silent before it counts as failed, 0: for ever; None: as the environment says, else "
      "10 seconds. Raises DistStoreError naming the ranks that did not come, "
      "DistNetworkError "
      "for addresses, ValueError (DistArgumentError) for arguments and for a second call.");
  module.def(
      "destroy_process_group", &destroy_beside_exceptions, py::arg("group") = py::none(),
      "Ends one group, or all of them for None and the default one; every member calls it. Raises "
      "what a member "
      "called and another skipped, and a failure that no call has shown yet, after everything is "
      "taken down. In `finally` or `except`, while an exception is handled, it warns "
      "instead.");
  using Released = py::call_guard<py::gil_scoped_release>;
  module.def("is_initialized", &is_initialized, Released(),
             "Whether this process (or thread, where ranks are threads) has a default group.");
  module.def("default_group", &default_group, Released());
  module.def(
      "_find_group", [](const std::string& name) { return World::current().find(name); },
      Released());
  module.def(
      "_group_count", [] { return World::current().group_count(); }, Released());
  module.def("get_rank", &get_rank, py::arg("group") = py::none(),
             "This process's rank in the group (None: the default one); -1 for a non-member.");
  module.def("get_world_size", &get_world_size, py::arg("group") = py::none(),
             "The number of members; -1 for a non-member.");
  module.def("get_backend", &get_backend, py::arg("group") = py::none(),
             "The lower-case name that the group's backend was asked for by; `cpu:native` where "
             "none was. Members only.");
  module.def("get_group_rank", &get_group_rank, py::arg("group"), py::arg("global_rank"),
             "From a rank of the default group to one of `group`. Raises ValueError "
             "(DistArgumentError) for a non-member.");
  module.def("get_global_rank", &get_global_rank, py::arg("group"), py::arg("group_rank"),
             "From a rank of `group` to one of the default group. Raises ValueError "
             "(DistArgumentError) for a rank that it "
             "has not.");
  module.def("get_process_group_ranks", &get_process_group_ranks, py::arg("group"),
             "The members, as ranks of the default group, in the group's order.");

  module.def(
      "new_group",
      [](std::optional<std::vector<int>> ranks, Limit timeout, Text backend,
         const py::object& pg_options, bool use_local_synchronization, const Text& group_desc,
         const DeviceId& device_id, bool sort_ranks) {
        const NewGroupOptions options{.ranks = Ranks(std::move(ranks)),
                                      .timeout = timeout,
                                      .backend = std::move(backend),
                                      .pg_options = pg_options_of(pg_options),
                                      .use_local_synchronization = use_local_synchronization,
                                      .device_id = device_of(device_id, "new_group"),
                                      .sort_ranks = sort_ranks};
        const auto made = blocking(nullptr, [&] { return new_group(options); });
        bind_device(made, device_id);
        return described(made, group_desc);
      },
      py::arg("ranks") = py::none(), py::arg("timeout") = py::none(),
      py::arg("backend") = py::none(), py::arg("pg_options") = py::none(),
      py::arg("use_local_synchronization") = false, py::arg("group_desc") = py::none(),
      py::arg("device_id") = py::none(), py::arg("sort_ranks") = true,
      "A group of some ranks (of the default group; None: all), in sorted order, or in that of "
      "`ranks` with sort_ranks false. All ranks "
      "call it, in the same "
      "order; with use_local_synchronization only its members. A process that is no member gets a "
      "group that is "
      "false. device_id as in init_process_group; group_desc: what the property of that name "
      "gives. Raises DistBackendError on all where "
      "calls differ, naming both, and where a rank fails or does not come within `timeout` "
      "(datetime.timedelta; None: the backend's, 30 "
      "minutes), ValueError (DistArgumentError) for ranks that there are not, are named twice or "
      "are none, and for backends.");
  module.def(
      "split_group",
      [](const Group& parent, const std::optional<std::vector<std::vector<int>>>& split_ranks,
         Limit timeout, const py::object& pg_options, const Text& group_desc, Text backend) {
        if (!split_ranks)
          group::invalid(
              "split_group: split_ranks is missing: give a list of lists of ranks of the parent");
        const SplitGroupOptions options{.timeout = timeout,
                                        .backend = std::move(backend),
                                        .pg_options = pg_options_of(pg_options)};
        return described(
            blocking(parent, [&] { return split_group(parent, *split_ranks, options); }),
            group_desc);
      },
      py::arg("parent_pg") = py::none(), py::arg("split_ranks") = py::none(),
      py::arg("timeout") = py::none(), py::arg("pg_options") = py::none(),
      py::arg("group_desc") = py::none(), py::arg("backend") = py::none(),
      "Divides a group (None: the default one) by lists of its ranks, which must not overlap; each "
      "member gets the "
      "group of its list, a false one where it is in none. Every member calls it with the same "
      "lists. backend: some of the parent's; "
      "timeout (datetime.timedelta), None: the parent's. Raises DistBackendError on all where "
      "calls differ, naming both, and where a rank "
      "fails or does not come in time; ValueError (DistArgumentError) without lists, where they "
      "overlap, are empty or name ranks that "
      "there "
      "are not, for another backend and for a process that is no member of the parent.");
  module.def(
      "new_subgroups",
      [](std::optional<int> group_size, const Group& group, Limit timeout, Text backend,
         const py::object& pg_options, const Text& group_desc) {
        const NewSubgroupsOptions options{.group = group,
                                          .timeout = timeout,
                                          .backend = std::move(backend),
                                          .pg_options = pg_options_of(pg_options)};
        return described(blocking(group, [&] { return new_subgroups(group_size, options); }),
                         group_desc);
      },
      py::arg("group_size") = py::none(), py::arg("group") = py::none(),
      py::arg("timeout") = py::none(), py::arg("backend") = py::none(),
      py::arg("pg_options") = py::none(), py::arg("group_desc") = py::none(),
      "Groups of `group_size` consecutive ranks (None: one group per host): this process's own, "
      "and the list of all. "
      "Every member of `group` (None: the default one) calls it. Raises ValueError "
      "(DistArgumentError) where the number of ranks is not a "
      "multiple and for another backend than the group's, DistBackendError on all where calls "
      "differ, and where a rank fails or does not "
      "come in time.");
  module.def(
      "new_subgroups_by_enumeration",
      [](const std::vector<std::vector<int>>& ranks_per_subgroup_list, Limit timeout, Text backend,
         const py::object& pg_options, const Text& group_desc) {
        const NewSubgroupsOptions options{.timeout = timeout,
                                          .backend = std::move(backend),
                                          .pg_options = pg_options_of(pg_options)};
        return described(
            blocking(
                nullptr,
                [&] { return new_subgroups_by_enumeration(ranks_per_subgroup_list, options); }),
            group_desc);
      },
      py::arg("ranks_per_subgroup_list"), py::arg("timeout") = py::none(),
      py::arg("backend") = py::none(), py::arg("pg_options") = py::none(),
      py::arg("group_desc") = py::none(),
      "Groups of the listed ranks of the default group, which must not overlap: this process's "
      "own, and the list of "
      "all; a false one where it is in none. All ranks call it with the same lists. Raises "
      "ValueError (DistArgumentError) where they "
      "overlap, "
      "are empty or name ranks that there are not, and for another backend than the default "
      "group's; DistBackendError on all where calls "
      "differ, and where a rank fails or does not come in time.");
  module.def(
      "shrink_group",
      [](const std::vector<int>& ranks_to_exclude, const Group& group, int shrink_flags,
         const py::object& pg_options, Limit timeout) {
        const auto flags =
            shrink_flags != 0 ? ShrinkFlags::SHRINK_ABORT : ShrinkFlags::SHRINK_DEFAULT;
        const ShrinkGroupOptions options{.group = group,
                                         .shrink_flags = flags,
                                         .timeout = timeout,
                                         .pg_options = pg_options_of(pg_options)};
        return blocking(group, [&] { return shrink_group(ranks_to_exclude, options); });
      },
      py::arg("ranks_to_exclude") = std::vector<int>{}, py::arg("group") = py::none(),
      py::arg("shrink_flags") = 0, py::arg("pg_options") = py::none(),
      py::arg("timeout") = py::none(),
      "A group of those members that are left: without the listed ranks of the group, and without "
      "those that have "
      "died or die meanwhile. Every survivor calls it. shrink_flags: SHRINK_ABORT ends first what "
      "is in flight. Where"
      " the default group is shrunk, the new one takes its place, with ranks from 0. Raises "
      "DistBackendError naming a living member that "
      "does not call within `timeout` (datetime.timedelta; None: the group's), ValueError "
      "(DistArgumentError) for ranks that the group has "
      "not, for one named twice, for a caller that is excluded and for one that is no member.");
  module.def(
      "grow_group",
      [](const std::vector<int>& ranks, const Group& group, Limit timeout, Text backend,
         const py::object& pg_options, const DeviceId& device_id) {
        const GrowGroupOptions options{.group = group,
                                       .timeout = timeout,
                                       .backend = std::move(backend),
                                       .pg_options = pg_options_of(pg_options),
                                       .device_id = device_of(device_id, "grow_group")};
        auto grown = blocking(nullptr, [&] { return grow_group(ranks, options); });
        bind_device(grown, device_id);
        return grown;
      },
      py::arg("ranks"), py::arg("group") = py::none(), py::arg("timeout") = py::none(),
      py::arg("backend") = py::none(), py::arg("pg_options") = py::none(),
      py::arg("device_id") = py::none(),
      "A group of the members of `group` and of ranks that join it. ranks, of the default group: "
      "the members in their order, then those that join, which leave `group` out. All of them call "
      "it with the same ranks, backend (None: the default group's) and timeout "
      "(datetime.timedelta). nccl grows its communicator if NCCL can. Raises ValueError "
      "(DistArgumentError) for ranks that do not fit the group, DistBackendError on all where a "
      "group has failed and where a rank fails or does not come in time.");
}

}  // namespace muster::python
