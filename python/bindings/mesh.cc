#include "muster/mesh/device_mesh.h"

#include <algorithm>
#include <map>
#include <set>
#include <variant>

#include "bindings.h"
#include "blocking.h"
#include "muster/group/errors.h"
#include "no_gil.h"
#include "pg_options.h"

namespace muster::python {
namespace {

namespace py = pybind11;
using Names = std::optional<std::vector<std::string>>;
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

/// torch's dict, from a dimension (number or name) to a backend's name, its options, or both as a tuple: by dimension.
std::vector<DimensionBackend> by_dimension(const Override& given, std::size_t dimensions, const Names& names) {
  std::vector<DimensionBackend> all(given ? dimensions : 0);
  std::set<std::size_t> seen;
  for (const auto& [where, what] : given.value_or(std::map<std::variant<int, std::string>, py::object>{})) {
    std::size_t dim = dimensions;
    if (const auto* number = std::get_if<int>(&where)) {
      dim = static_cast<std::size_t>(*number);
    } else if (names) {
      const auto at = std::find(names->begin(), names->end(), std::get<std::string>(where));
      if (at != names->end()) dim = static_cast<std::size_t>(at - names->begin());
    }
    const auto key = py::repr(py::cast(where)).cast<std::string>();
    if (dim >= dimensions) group::invalid("init_device_mesh: backend_override has the key " + key + ", which is no dimension");
    if (!seen.insert(dim).second) group::invalid("init_device_mesh: backend_override names dimension " + key + " twice");
    const bool pair = py::isinstance<py::tuple>(what);
    const py::object backend = pair ? py::object(what[py::int_(0)]) : what, options = pair ? py::object(what[py::int_(1)]) : what;
    if (py::isinstance<py::str>(backend)) all[dim].backend = backend.cast<std::string>();
    if (!py::isinstance<py::str>(options)) all[dim].pg_options = pg_options_of(options);
  }
  return all;
}

DeviceMesh mesh_of_groups(const std::variant<Group, std::vector<Group>>& group, const std::string& device_type, const py::object& mesh,
                          const Names& names) {
  const auto* one = std::get_if<Group>(&group);
  std::optional<MeshRanks> ranks;
  if (!mesh.is_none()) ranks.emplace(py::module_::import("torch").attr("as_tensor")(mesh).cast<at::Tensor>());
  return DeviceMesh::from_groups(one != nullptr ? std::vector{*one} : std::get<std::vector<Group>>(group), device_type, ranks,
                                 names.value_or(std::vector<std::string>{}));
}

DeviceMesh make_mesh(const std::string& device_type, const py::object& mesh, const Names& names, bool groups) {
  const auto ranks = py::module_::import("torch").attr("as_tensor")(mesh).cast<at::Tensor>();
  return blocking(nullptr, [&] {
    return DeviceMesh(device_type, MeshRanks(ranks),
                      {.mesh_dim_names = names.value_or(std::vector<std::string>{}), ._init_process_groups = groups});
  });
}

}  // namespace

void bind_mesh(py::module_& module) {
  py::class_<DeviceMesh, std::shared_ptr<DeviceMesh>>(
      module, "DeviceMesh", "A grid of ranks, with a group for every line along every dimension.", let_go_without_gil<DeviceMesh>())
      .def(py::init(&make_mesh), py::arg("device_type"), py::arg("mesh"), py::kw_only(), py::arg("mesh_dim_names") = py::none(),
           py::arg("_init_process_groups") = true)
      .def_static(
          "from_group", &mesh_of_groups, py::arg("group"), py::arg("device_type"), py::arg("mesh") = py::none(), py::kw_only(),
          py::arg("mesh_dim_names") = py::none(),
          "A mesh on groups that are there: one, or a list with this process's group along each dimension. mesh: the ranks, with as "
          "many dimensions; it may be left out of one group, mesh_dim_names too. Talks to nobody. Raises ValueError "
          "(DistArgumentError) where a group's ranks are not those of this process's line in the mesh.")
      .def_property_readonly("device_type", &DeviceMesh::device_type)
      .def_property_readonly("mesh", &DeviceMesh::mesh)
      .def_property_readonly("ndim", &DeviceMesh::ndim)
      .def_property_readonly("shape", [](const DeviceMesh& self) { return py::tuple(py::cast(self.shape())); })
      .def_property_readonly("mesh_dim_names",
                             [](const DeviceMesh& self) -> py::object {
                               if (self.mesh_dim_names().empty()) return py::none();
                               return py::tuple(py::cast(self.mesh_dim_names()));
                             })
      .def("size", &DeviceMesh::size, py::arg("mesh_dim") = py::none(), "The number of ranks, or along one dimension (its number).")
      .def(
          "get_group", [](const DeviceMesh& self, const Place& mesh_dim) { return self.get_group(dimension(mesh_dim)); },
          py::arg("mesh_dim") = py::none(),
          "The group of this rank's line along a dimension (number or name; may be left out of a mesh of one).")
      .def("get_all_groups", &DeviceMesh::get_all_groups, "This rank's groups, by dimension.")
      .def("get_rank", &DeviceMesh::get_rank, "This process's rank in the default group.")
      .def(
          "get_local_rank", [](const DeviceMesh& self, const Place& mesh_dim) { return self.get_local_rank(dimension(mesh_dim)); },
          py::arg("mesh_dim") = py::none(), "This rank's position along a dimension (number or name).")
      .def("get_coordinate", &DeviceMesh::get_coordinate, "This rank's position in all dimensions; None where the mesh is of others.")
      .def("__getitem__",
           [](const DeviceMesh& self, const std::variant<std::string, std::vector<std::string>>& names) {
             const auto* one = std::get_if<std::string>(&names);
             return self.slice(one != nullptr ? std::vector{*one} : std::get<std::vector<std::string>>(names));
           })
      .def(
          "_flatten",
          [](const DeviceMesh& self, const std::optional<std::string>& mesh_dim_name) {
            return blocking(nullptr, [&] { return self.flatten(mesh_dim_name); });
          },
          py::arg("mesh_dim_name") = py::none(), "A mesh of one dimension with all its ranks.")
      .def("__enter__",
           [](const DeviceMesh& self) {
             scopes().push_back(std::make_unique<DeviceMesh::Scope>(self));
             return self;
           })
      .def("__exit__", [](const DeviceMesh&, const py::args&) { scopes().pop_back(); })
      .def("__eq__", [](const DeviceMesh& self, const DeviceMesh& other) { return self == other; })
      .def("__hash__", [](const DeviceMesh& self) { return py::hash(py::cast(self.shape()).attr("__repr__")()); })
      .def("__repr__", [](const DeviceMesh& self) {
        return py::str("DeviceMesh('{}', {}, mesh_dim_names={})")
            .format(self.device_type(), py::cast(self.mesh()).attr("tolist")(), self.mesh_dim_names());
      });
  module.def(
      "init_device_mesh",
      [](const std::string& device_type, const std::vector<int>& mesh_shape, const Names& names, const Override& backend_override) {
        const InitDeviceMeshOptions options{.mesh_dim_names = names.value_or(std::vector<std::string>{}),
                                            .backend_override = by_dimension(backend_override, mesh_shape.size(), names)};
        return blocking_on_store([&] { return init_device_mesh(device_type, mesh_shape, options); });
      },
      py::arg("device_type"), py::arg("mesh_shape"), py::kw_only(), py::arg("mesh_dim_names") = py::none(),
      py::arg("backend_override") = py::none(),
      "A DeviceMesh of all ranks in rows: mesh_shape, one number for each dimension, mesh_dim_names as many. Makes "
      "the default group where there is none. backend_override: from a dimension (number or name) to the backend of its groups, its "
      "pg_options, or a tuple of both. Raises ValueError (DistArgumentError) on every rank where the product "
      "is not the world size or shapes differ, and for keys that are no dimension; DistBackendError where a rank fails or does not come.");
}

}  // namespace muster::python
