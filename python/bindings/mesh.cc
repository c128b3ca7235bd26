// SPDX-License-Identifier: BSD-3-Clause
#include "muster/device_mesh.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <variant>

#include "bindings.h"
#include "blocking.h"
#include "core/group/errors.h"
#include "muster/debug.h"
#include "no_gil.h"
#include "pg_options.h"
#include "rpc/functions.h"
#include "train/mesh/mesh_axis.h"

namespace muster::python {
namespace {

namespace py = pybind11;
using Names = std::optional<std::vector<std::string>>;
using MeshRef =
    std::shared_ptr<DeviceMesh>;  // as Python has it: what comes back is the same object
using Place = std::variant<std::monostate, int, std::string>;

DeviceMesh::Dimension dimension(const Place& place) {
  if (const auto* number = std::get_if<int>(&place)) return *number;
  if (const auto* name = std::get_if<std::string>(&place)) return *name;
  return {};
}

/// Those that this thread is in.
std::vector<std::unique_ptr<DeviceMesh::Scope>>& scopes() {
  thread_local std::vector<std::unique_ptr<DeviceMesh::Scope>> entered;
  return entered;
}

using Override = std::optional<std::map<std::variant<int, std::string>, py::object>>;

/// torch's value for a dimension: a backend's name, its options, or both as a tuple; None for
/// neither.
DimensionBackend backend_of(const py::object& what) {
  DimensionBackend made;
  const bool pair = py::isinstance<py::tuple>(what);
  const py::object backend = pair ? py::object(what[py::int_(0)]) : what,
                   options = pair ? py::object(what[py::int_(1)]) : what;
  if (py::isinstance<py::str>(backend)) made.backend = backend.cast<std::string>();
  if (!py::isinstance<py::str>(options)) made.pg_options = pg_options_of(options);
  return made;
}

std::vector<DimensionBackend> backends_of(const std::optional<std::vector<py::object>>& given) {
  std::vector<DimensionBackend> all;
  for (const auto& each : given.value_or(std::vector<py::object>{}))
    all.push_back(backend_of(each));
  return all;
}

/// torch's dict, from a dimension (number or name) to what `backend_of` takes: by dimension.
std::vector<DimensionBackend> by_dimension(const Override& given, std::size_t dimensions,
                                           const Names& names, const std::string& caller) {
  std::vector<DimensionBackend> all(given ? dimensions : 0);
  std::set<std::size_t> seen;
  for (const auto& [where, what] :
       given.value_or(std::map<std::variant<int, std::string>, py::object>{})) {
    std::size_t dim = dimensions;
    if (const auto* number = std::get_if<int>(&where)) {
      dim = static_cast<std::size_t>(*number);
    } else if (names) {
      const auto at = std::find(names->begin(), names->end(), std::get<std::string>(where));
      if (at != names->end()) dim = static_cast<std::size_t>(at - names->begin());
    }
    const auto key = py::repr(py::cast(where)).cast<std::string>();
    if (dim >= dimensions)
      group::invalid(caller + ": backend_override has the key " + key + ", which is no dimension");
    if (!seen.insert(dim).second)
      group::invalid(caller + ": backend_override names dimension " + key + " twice");
    all[dim] = backend_of(what);
  }
  return all;
}

/// The exception class for a missing dimension: programs for torch catch KeyError or IndexError.
/// Never released.
PyObject* lookup_error = nullptr;

void make_lookup_error(py::module_& module) {
  const auto bases = py::make_tuple(module.attr("DistArgumentError"), py::handle(PyExc_KeyError),
                                    py::handle(PyExc_IndexError));
  py::dict members;
  members["__str__"] =
      py::handle(PyExc_Exception).attr("__str__");  // KeyError's own would quote the sentence
  lookup_error = PyErr_NewExceptionWithDoc(
      "muster.DistLookupError",
      "A mesh has no such dimension: a DistArgumentError, a KeyError and an IndexError.",
      bases.ptr(), members.ptr());
  if (lookup_error == nullptr) throw py::error_already_set();
  module.add_object("DistLookupError", py::reinterpret_borrow<py::object>(lookup_error));
}

/// `call()`, whose wrong arguments are dimensions.
template <class Call>
auto looking_up(Call call) {
  try {
    return call();
  } catch (const DistError& error) {
    if (error.code() != Code::invalid_argument) throw;
    py::object made = py::reinterpret_borrow<py::object>(lookup_error)(error.what());
    made.attr("ranks") = error.ranks();
    made.attr("code") = code_name(error.code());
    PyErr_SetObject(lookup_error, made.ptr());
    throw py::error_already_set();
  }
}

/// Describes groups created for a mesh as torch does: `mesh_tp`, or `mesh_dim_1`.
DeviceMesh with_descriptions(DeviceMesh mesh) {
  const auto& names = mesh.mesh_dim_names();
  const auto groups =
      mesh.describe().part.group_names.empty() ? std::vector<Group>{} : mesh.get_all_groups();
  for (std::size_t dim = 0; dim < groups.size(); ++dim)
    describe_group(groups[dim],
                   "mesh_" + (names.empty() ? "dim_" + std::to_string(dim) : names[dim]));
  return mesh;
}

DeviceMesh mesh_of_groups(const std::variant<Group, std::vector<Group>>& group,
                          const std::string& device_type, const py::object& mesh,
                          const Names& names) {
  const auto* one = std::get_if<Group>(&group);
  std::optional<MeshRanks> ranks;
  if (!mesh.is_none())
    ranks.emplace(py::module_::import("torch").attr("as_tensor")(mesh).cast<at::Tensor>());
  return DeviceMesh::from_groups(
      one != nullptr ? std::vector{*one} : std::get<std::vector<Group>>(group), device_type, ranks,
      names.value_or(std::vector<std::string>{}));
}

DeviceMesh make_mesh(const std::string& device_type, const py::object& mesh, const Names& names,
                     const std::optional<std::vector<py::object>>& backend_override,
                     bool preserve_rank_order, bool backend, std::optional<int> rank, bool groups) {
  if (mesh.is_none()) group::invalid("DeviceMesh: mesh must be given: the ranks, as an array");
  const auto ranks = py::module_::import("torch").attr("as_tensor")(mesh).cast<at::Tensor>();
  const DeviceMeshOptions options{.mesh_dim_names = names.value_or(std::vector<std::string>{}),
                                  ._init_process_groups = groups && backend,
                                  .backend_override = backends_of(backend_override),
                                  .preserve_rank_order = preserve_rank_order,
                                  ._rank = rank};
  return with_descriptions(
      blocking_on_store([&] { return DeviceMesh(device_type, MeshRanks(ranks), options); }));
}

std::optional<py::tuple> names_of(const DeviceMesh& mesh) {
  if (mesh.mesh_dim_names().empty()) return std::nullopt;
  return py::tuple(py::cast(mesh.mesh_dim_names()));
}

std::optional<py::tuple> coordinate_of(const DeviceMesh& mesh) {
  const auto found = mesh.get_coordinate();
  if (!found) return std::nullopt;
  return py::tuple(py::cast(*found));
}

/// As torch's: DeviceMesh((dp=2, tp=4), 'cpu', stride=(4, 1)).
std::string text_of(const DeviceMesh& mesh) {
  const auto axes = mesh.describe().part.axes;
  const auto& names = mesh.mesh_dim_names();
  std::string shape, strides;
  const auto tuple = [](const std::vector<std::string>& parts) {
    std::string out = "(";
    for (std::size_t i = 0; i < parts.size(); ++i) out += (i > 0 ? ", " : "") + parts[i];
    return out + (parts.size() == 1 ? ",)" : ")");
  };
  std::vector<std::string> all;
  for (std::size_t dim = 0; dim < axes.size(); ++dim) {
    shape += (dim > 0 ? ", " : "") + (names.empty() ? "" : names[dim] + "=") +
             std::to_string(axes[dim].size());
    std::vector<std::string> each;
    for (const int stride : mesh::strides_of(axes[dim])) each.push_back(std::to_string(stride));
    all.push_back(each.size() == 1 ? each.front() : tuple(each));
  }
  if (names.empty() && axes.size() == 1) shape += ",";
  auto text = "DeviceMesh((" + shape + "), '" + mesh.device_type() + "', stride=" + tuple(all);
  if (get_debug_level() == DebugLevel::DETAIL)
    text += ", Mesh: " + py::str(py::cast(mesh.mesh()).attr("tolist")()).cast<std::string>();
  return text + ")";
}

using PartAsTuple =
    std::tuple<std::vector<std::vector<int>>, std::vector<std::string>, std::vector<std::string>>;
PartAsTuple as_tuple(const DeviceMeshDescription::Part& part) {
  return {part.axes, part.names, part.group_names};
}
DeviceMeshDescription::Part of_tuple(const PartAsTuple& part) {
  return {std::get<0>(part), std::get<1>(part), std::get<2>(part)};
}

py::tuple mesh_state(const DeviceMesh& mesh) {
  const auto told = mesh.describe();
  std::map<std::string, PartAsTuple> flattened;
  for (const auto& [name, part] : told.flattened) flattened.emplace(name, as_tuple(part));
  return py::make_tuple(told.device_type, told.ranks, told.preserve_rank_order, told.rank,
                        as_tuple(told.root), flattened, as_tuple(told.part));
}

DeviceMesh mesh_of_state(const py::tuple& state) {
  DeviceMeshDescription told{.device_type = state[0].cast<std::string>(),
                             .ranks = state[1].cast<std::vector<int>>(),
                             .preserve_rank_order = state[2].cast<bool>(),
                             .rank = state[3].cast<int>(),
                             .root = of_tuple(state[4].cast<PartAsTuple>()),
                             .flattened = {},
                             .part = of_tuple(state[6].cast<PartAsTuple>())};
  for (const auto& [name, part] : state[5].cast<std::map<std::string, PartAsTuple>>())
    told.flattened.emplace(name, of_tuple(part));
  return DeviceMesh::from_description(told);
}

/// Private members of torch's class that libraries read.
void bind_private_names(py::class_<DeviceMesh, MeshRef>& mesh) {
  const auto root_or_none = [](const DeviceMesh& self) {
    auto root = self.root();
    return root == self ? std::nullopt : std::optional(std::move(root));
  };
  mesh.def("_get_root_mesh", &DeviceMesh::root,
           "The mesh that this one is a part of; itself where it is none.")
      .def_property_readonly("_root_mesh", root_or_none)
      .def_property_readonly("_flatten_mapping",
                             [](const DeviceMesh& self) {
                               return self.root() == self ? self.flattened()
                                                          : std::map<std::string, DeviceMesh>{};
                             })
      .def_property_readonly("_device_type", &DeviceMesh::device_type)
      .def_property_readonly("_mesh_dim_names", &names_of)
      .def_property_readonly("_rank", &DeviceMesh::get_rank)
      .def_property_readonly("_coordinate_on_dim", &coordinate_of)
      .def_property_readonly("_preserve_rank_order", &DeviceMesh::preserve_rank_order)
      .def_property_readonly(
          "_flatten_rank_map",
          [](const DeviceMesh& self) { return py::tuple(py::cast(self.describe().ranks)); })
      .def_property_readonly("_rank_map",
                             [](const DeviceMesh& self) { return self.root().mesh().flatten(); })
      .def_property_readonly(
          "_dim_group_names",
          [](const DeviceMesh& self) { return self.describe().part.group_names; })
      .def("_get_mesh_dim_by_name",
           [](const DeviceMesh& self, const std::string& name) {
             const auto& names = self.mesh_dim_names();
             const auto at = std::find(names.begin(), names.end(), name);
             if (at == names.end())
               looking_up(
                   [&] { group::invalid("DeviceMesh: there is no dimension '" + name + "'"); });
             return at - names.begin();
           })
      .def("_get_root_mesh_dim",
           [](const DeviceMesh& self) -> std::optional<std::ptrdiff_t> {
             const auto all = self.root().mesh_dim_names();
             if (self.mesh_dim_names().empty()) return std::nullopt;
             if (self.ndim() != 1)
               group::invalid("DeviceMesh._get_root_mesh_dim: the mesh has " +
                              std::to_string(self.ndim()) + " dimensions; it is for one");
             const auto at = std::find(all.begin(), all.end(), self.mesh_dim_names().front());
             if (at == all.end())
               looking_up([&] {
                 group::invalid("DeviceMesh: the root mesh has no dimension '" +
                                self.mesh_dim_names().front() + "'");
               });
             return at - all.begin();
           })
      .def(
          "_get_all_submeshes",
          [](const DeviceMesh& self, const std::string& mesh_dim_name) {
            return looking_up([&] { return self.lines(mesh_dim_name); });
          },
          py::arg("mesh_dim_name"), "All lines along a dimension, as meshes of their own.")
      .def("_is_current_rank_part_of_mesh",
           [](const DeviceMesh& self) { return self.get_coordinate().has_value(); })
      .def("_sym_get_coordinate",
           [](const DeviceMesh& self, int index) {
             return looking_up([&] {
               const auto found = self.get_coordinate();
               if (!found)
                 group::invalid("DeviceMesh: rank " + std::to_string(self.get_rank()) +
                                " is not in the mesh");
               return found->at(static_cast<std::size_t>(index < 0 ? index + self.ndim() : index));
             });
           })
      .def(
          "_flatten",
          [](const MeshRef& self, const std::optional<std::string>& mesh_dim_name,
             const py::object& backend_override) {
            if (self->ndim() == 1 && mesh_dim_name.value_or("").empty() &&
                !self->mesh_dim_names().empty())
              return self;
            const auto on = backend_of(backend_override);
            return std::make_shared<DeviceMesh>(with_descriptions(
                blocking(nullptr, [&] { return self->flatten(mesh_dim_name, on); })));
          },
          py::arg("mesh_dim_name") = py::none(), py::arg("backend_override") = py::none(),
          "A mesh of one dimension with all its ranks; slicing the root mesh by its name finds it "
          "again. Raises ValueError "
          "(DistArgumentError) where the name is taken.")
      .def(
          "_unflatten",
          [](const DeviceMesh& self, const std::variant<int, std::string>& dim,
             const std::vector<int>& mesh_sizes, const std::vector<std::string>& mesh_dim_names,
             const Override& backend_override) {
            const auto on = by_dimension(backend_override, mesh_sizes.size(), mesh_dim_names,
                                         "DeviceMesh._unflatten");
            const auto which =
                std::visit([](const auto& each) { return DeviceMesh::Dimension(each); }, dim);
            return with_descriptions(blocking(
                nullptr, [&] { return self.unflatten(which, mesh_sizes, mesh_dim_names, on); }));
          },
          py::arg("dim"), py::arg("mesh_sizes"), py::arg("mesh_dim_names"),
          py::arg("backend_override") = py::none(),
          "One dimension (number or name) as several, in rows. All ranks call it. Raises "
          "ValueError (DistArgumentError) where the "
          "product of mesh_sizes is not its size.")
      .def_static("_concatenate", &DeviceMesh::concatenate, py::arg("device_mesh_list"),
                  "The dimensions of several parts of one mesh as one mesh. Talks to nobody. "
                  "Raises ValueError (DistArgumentError) where "
                  "they overlap or are of different meshes.");
}

}  // namespace

void bind_mesh(py::module_& module) {
  make_lookup_error(module);
  py::class_<DeviceMesh, MeshRef> mesh(
      module, "DeviceMesh", "A grid of ranks, with a group for every line along every dimension.",
      let_go_without_gil<DeviceMesh>());
  mesh.def(py::init(&make_mesh), py::arg("device_type"), py::arg("mesh") = py::none(),
           py::kw_only(), py::arg("mesh_dim_names") = py::none(),
           py::arg("backend_override") = py::none(), py::arg("preserve_rank_order") = false,
           py::arg("_init_backend") = true, py::arg("_rank") = py::none(),
           py::arg("_init_process_groups") = true,
           "mesh: the ranks of the default group (which is made where there is none), an array of "
           "any shape. mesh_dim_names, "
           "backend_override: one for each dimension; a backend is given as in init_device_mesh. "
           "preserve_rank_order: groups keep the "
           "order of the mesh, else their ranks are sorted. _init_backend or _init_process_groups "
           "False: a layout without groups, for "
           "which _rank stands for the rank in the default group. Raises ValueError "
           "(DistArgumentError) on every rank for what is wrong "
           "or differs between ranks.")
      .def_static("from_group", &mesh_of_groups, py::arg("group"), py::arg("device_type"),
                  py::arg("mesh") = py::none(), py::kw_only(),
                  py::arg("mesh_dim_names") = py::none(),
                  "A mesh on groups that are there: one, or a list with this process's group along "
                  "each dimension. mesh: the ranks, with as "
                  "many dimensions; it may be left out of one group, mesh_dim_names too. Talks to "
                  "nobody. Raises ValueError "
                  "(DistArgumentError) where a group's ranks are not those of this process's line "
                  "in the mesh.")
      .def_property_readonly("device_type", &DeviceMesh::device_type)
      .def_property_readonly("mesh", &DeviceMesh::mesh)
      .def_property_readonly("ndim", &DeviceMesh::ndim)
      .def_property_readonly(
          "shape", [](const DeviceMesh& self) { return py::tuple(py::cast(self.shape())); })
      .def_property_readonly("mesh_dim_names", &names_of)
      .def(
          "size",
          [](const DeviceMesh& self, std::optional<int> mesh_dim) {
            return looking_up([&] { return self.size(mesh_dim); });
          },
          py::arg("mesh_dim") = py::none(),
          "The number of ranks, or along one dimension (its number).")
      .def(
          "get_group",
          [](const DeviceMesh& self, const Place& mesh_dim) {
            return looking_up([&] { return self.get_group(dimension(mesh_dim)); });
          },
          py::arg("mesh_dim") = py::none(),
          "The group of this rank's line along a dimension (number, or name, also of a flattened "
          "part; may be left out of a mesh of one).")
      .def("get_all_groups", &DeviceMesh::get_all_groups, "This rank's groups, by dimension.")
      .def("get_rank", &DeviceMesh::get_rank, "This process's rank in the default group.")
      .def(
          "get_local_rank",
          [](const DeviceMesh& self, const Place& mesh_dim) {
            return looking_up([&] { return self.get_local_rank(dimension(mesh_dim)); });
          },
          py::arg("mesh_dim") = py::none(),
          "This rank's rank in the group along a dimension (as of get_group).")
      .def("get_coordinate", &coordinate_of,
           "This rank's position in all dimensions; None where the mesh is of others.")
      .def(
          "abort", [](const DeviceMesh& self) { blocking(nullptr, [&] { self.abort(); }); },
          "Aborts the groups of all dimensions and flattened parts. Raises ValueError "
          "(DistArgumentError) on a part of another mesh.")
      .def("__getitem__",
           [](const MeshRef& self,
              const std::variant<std::string, std::vector<std::string>>& names) {
             const auto* one = std::get_if<std::string>(&names);
             const auto all =
                 one != nullptr ? std::vector{*one} : std::get<std::vector<std::string>>(names);
             if (all == self->mesh_dim_names()) return self;
             return looking_up([&] { return std::make_shared<DeviceMesh>(self->slice(all)); });
           })
      .def("__enter__",
           [](const MeshRef& self) {
             scopes().push_back(std::make_unique<DeviceMesh::Scope>(*self));
             return self;
           })
      .def("__exit__", [](const DeviceMesh&, const py::args&) { scopes().pop_back(); })
      .def(
          "__eq__", [](const DeviceMesh& self, const DeviceMesh& other) { return self == other; },
          py::is_operator())
      .def("__hash__",
           [](const DeviceMesh& self) {
             const auto told = self.describe();
             return py::hash(py::make_tuple(py::tuple(py::cast(told.ranks)),
                                            py::str(py::cast(told.part.axes)), told.device_type,
                                            names_of(self), told.preserve_rank_order));
           })
      .def("__repr__", &text_of)
      .def(py::pickle([](const DeviceMesh& self) { return mesh_state(self); },
                      [](const py::tuple& state) { return mesh_of_state(state); }));
  bind_private_names(mesh);
  module.def("_current_mesh", &DeviceMesh::current);
  module.def(
      "init_device_mesh",
      [](const std::string& device_type, const std::vector<int>& mesh_shape, const Names& names,
         const Override& backend_override) {
        const InitDeviceMeshOptions options{
            .mesh_dim_names = names.value_or(std::vector<std::string>{}),
            .backend_override =
                by_dimension(backend_override, mesh_shape.size(), names, "init_device_mesh")};
        return with_descriptions(
            blocking_on_store([&] { return init_device_mesh(device_type, mesh_shape, options); }));
      },
      py::arg("device_type"), py::arg("mesh_shape"), py::kw_only(),
      py::arg("mesh_dim_names") = py::none(), py::arg("backend_override") = py::none(),
      "A DeviceMesh of all ranks in rows: mesh_shape, one number for each dimension, "
      "mesh_dim_names as many. Makes "
      "the default group where there is none. backend_override: from a dimension (number or name) "
      "to the backend of its groups, its "
      "pg_options, or a tuple of both. Raises ValueError (DistArgumentError) on every rank where "
      "the product "
      "is not the world size or shapes differ, and for keys that are no dimension; "
      "DistBackendError where a rank fails or does not come.");
}

}  // namespace muster::python
