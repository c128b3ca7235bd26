// SPDX-License-Identifier: BSD-3-Clause
#include "muster/device_mesh.h"

#include <ATen/ops/empty.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <set>

#include "core/group/call/exchange.h"
#include "core/group/errors.h"
#include "core/group/world.h"
#include "muster/debug.h"
#include "muster/init.h"
#include "muster/subgroups.h"
#include "train/mesh/mesh_axis.h"

namespace muster {
namespace {

using group::invalid;
using group::list;
using mesh::MeshAxis;

std::string quoted(const std::vector<std::string>& names) {
  std::string out = "(";
  for (const auto& name : names) out += (out.size() > 1 ? ", '" : "'") + name + "'";
  return out + ")";
}

void check_device(const std::string& device_type, const std::string& caller) {
  try {
    const c10::Device device(device_type);
    if (!device.has_index()) return;
  } catch (const std::exception&) {
    // the message below says more than torch's
  }
  invalid(caller + ": '" + device_type +
          "' is no kind of device; give 'cpu' or 'cuda', without an index");
}

void check_names(const std::vector<std::string>& names, std::size_t dimensions,
                 const std::string& caller) {
  if (names.empty()) return;
  if (names.size() != dimensions)
    invalid(caller + ": mesh_dim_names " + quoted(names) + " has " + std::to_string(names.size()) +
            " names for " + std::to_string(dimensions) + " dimensions");
  auto sorted = names;
  std::sort(sorted.begin(), sorted.end());
  if (const auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end())
    invalid(caller + ": mesh_dim_names " + quoted(names) + " has '" + *twice +
            "' twice; the names must differ");
}

/// `world_size` is empty if there is no default group.
void check_ranks(const MeshRanks& mesh, std::optional<int> world_size, const std::string& caller) {
  if (!mesh.trouble().empty()) invalid(caller + ": " + mesh.trouble());
  if (mesh.values().empty()) invalid(caller + ": the mesh holds no rank");
  auto sorted = mesh.values();
  std::sort(sorted.begin(), sorted.end());
  if (sorted.front() < 0)
    invalid(caller + ": the mesh holds rank " + std::to_string(sorted.front()));
  if (world_size && sorted.back() >= *world_size)
    invalid(caller + ": the mesh holds rank " + std::to_string(sorted.back()) +
            "; the ranks of the default group are 0 to " + std::to_string(*world_size - 1));
  if (const auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end())
    invalid(caller + ": the mesh holds rank " + std::to_string(*twice) + " twice");
}

thread_local std::vector<DeviceMesh> scopes;

}  // namespace

MeshRanks::MeshRanks(const at::Tensor& ranks) {
  if (!ranks.defined() || c10::isFloatingType(ranks.scalar_type()) ||
      c10::isComplexType(ranks.scalar_type()) || ranks.scalar_type() == at::kBool) {
    trouble_ = "a mesh is an array of whole numbers, and this tensor is " +
               (ranks.defined() ? std::string(c10::toString(ranks.scalar_type())) : "undefined");
    return;
  }
  const auto numbers = ranks.to(at::kCPU, at::kLong).contiguous();
  const auto* values = numbers.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < numbers.numel(); ++i) values_.push_back(static_cast<int>(values[i]));
  for (const auto extent : numbers.sizes()) shape_.push_back(static_cast<int>(extent));
}

MeshRanks::MeshRanks(std::initializer_list<MeshRanks> parts) {
  for (const auto& part : parts) {
    if (trouble_.empty() && !part.trouble_.empty()) trouble_ = part.trouble_;
    if (trouble_.empty() && part.shape_ != parts.begin()->shape_)
      trouble_ = "the lists of a mesh must all be of one length";
    values_.insert(values_.end(), part.values_.begin(), part.values_.end());
  }
  shape_.push_back(static_cast<int>(parts.size()));
  if (parts.size() > 0)
    shape_.insert(shape_.end(), parts.begin()->shape_.begin(), parts.begin()->shape_.end());
}

MeshRanks::MeshRanks(const std::vector<int>& ranks)
    : values_(ranks), shape_{static_cast<int>(ranks.size())} {}

MeshRanks::MeshRanks(const std::vector<std::vector<int>>& rows) {
  for (const auto& row : rows) {
    if (row.size() != rows.front().size())
      trouble_ = "the lists of a mesh must all be of one length";
    values_.insert(values_.end(), row.begin(), row.end());
  }
  shape_ = {static_cast<int>(rows.size()),
            rows.empty() ? 0 : static_cast<int>(rows.front().size())};
}

struct DeviceMesh::Part {
  std::vector<MeshAxis> axes;
  std::vector<std::string> names;
  std::vector<Group> groups;  // this process's groups by axis; empty without groups

  // Set by Root::place.
  std::vector<int> shape = {};
  std::vector<int> ranks = {};  // ranks of the copy that contains this process, in row-major order
  std::optional<std::vector<int>> coordinate = {};
};

/// Shared by all parts of a mesh. Parts do not refer to it, so that it can own the flattened ones.
struct DeviceMesh::Root {
  const std::string device_type;
  const std::vector<int> ranks;
  const bool preserve_rank_order;
  const int rank;
  std::shared_ptr<const Part> whole;
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const Part>> flattened;

  Root(std::string device_type, std::vector<int> ranks, bool preserve_rank_order, int rank)
      : device_type(std::move(device_type)),
        ranks(std::move(ranks)),
        preserve_rank_order(preserve_rank_order),
        rank(rank) {}

  int count() const { return static_cast<int>(ranks.size()); }

  std::shared_ptr<const Part> flattened_as(const std::string& name) {
    const std::lock_guard lock(mutex);
    const auto at = flattened.find(name);
    return at == flattened.end() ? nullptr : at->second;
  }

  /// Locates this process in a part whose axes are set. A rank in none of its copies gets the
  /// first.
  std::shared_ptr<const Part> place(Part part, const std::string& caller) const {
    part.shape = mesh::shape_of(part.axes);
    const auto begins = mesh::origins(part.axes, count());
    if (!begins)
      invalid(caller + ": the dimensions " + quoted(part.names) +
              " overlap: a rank would stand in them twice");
    const auto offsets = mesh::joined(part.axes);
    const auto here = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
    int origin = begins->front();
    for (const int begin : *begins) {
      const auto at = std::find(offsets.begin(), offsets.end(), here - begin);
      if (at == offsets.end()) continue;
      origin = begin;
      part.coordinate = mesh::coordinate_of(part.shape, static_cast<int>(at - offsets.begin()));
    }
    for (const int offset : offsets)
      part.ranks.push_back(ranks[static_cast<std::size_t>(origin + offset)]);
    return std::make_shared<const Part>(std::move(part));
  }

  /// All lines along an axis, in the mesh's order.
  std::vector<std::vector<int>> lines(const MeshAxis& axis, const std::string& caller) const {
    const auto begins = mesh::origins({{axis}}, count());
    if (!begins) invalid(caller + ": the dimension does not divide the mesh");
    std::vector<std::vector<int>> all;
    for (const int begin : *begins) {
      all.emplace_back();
      for (const int offset : axis)
        all.back().push_back(ranks[static_cast<std::size_t>(begin + offset)]);
    }
    return all;
  }

  /// Creates the groups of all lines along an axis; returns this process's.
  Group divide(const MeshAxis& axis, const DimensionBackend& on, const std::string& caller) const {
    auto parts = lines(axis, caller);
    if (!preserve_rank_order)
      for (auto& part : parts) std::sort(part.begin(), part.end());
    const auto world = default_group();
    if (!on.backend && !on.pg_options) {
      if (parts.size() == 1 && parts.front() == world->ranks()) return world;
      return split_group(world, parts);
    }
    Group mine;
    for (auto& part : parts) {
      auto made = new_group({.ranks = std::move(part),
                             .timeout = world->timeout(),
                             .backend = on.backend,
                             .pg_options = on.pg_options,
                             .sort_ranks = false});
      if (made->is_member() || !mine) mine = std::move(made);
    }
    return mine;
  }

  std::vector<Group> divide(const std::vector<MeshAxis>& axes,
                            const std::vector<DimensionBackend>& on,
                            const std::string& caller) const {
    if (!on.empty() && on.size() != axes.size())
      invalid(caller + ": backend_override is for " + std::to_string(on.size()) +
              " dimensions, and there are " + std::to_string(axes.size()));
    std::vector<Group> groups;
    for (std::size_t dim = 0; dim < axes.size(); ++dim)
      groups.push_back(divide(axes[dim], on.empty() ? DimensionBackend() : on[dim], caller));
    return groups;
  }

  /// A mesh of ranks, without groups.
  static std::shared_ptr<Root> lay_out(const std::string& device_type, const MeshRanks& mesh,
                                       const DeviceMeshOptions& options) {
    const std::string caller = "DeviceMesh";
    const auto world = !options._init_process_groups && options._rank && !is_initialized()
                           ? nullptr
                           : default_group();
    check_device(device_type, caller);
    check_ranks(mesh, world ? std::optional(world->size()) : std::nullopt, caller);
    check_names(options.mesh_dim_names, mesh.shape().size(), caller);
    auto root = std::make_shared<Root>(device_type, mesh.values(), options.preserve_rank_order,
                                       options._rank.value_or(world ? world->rank() : -1));
    root->whole = root->place(
        {.axes = mesh::row_major_axes(mesh.shape()), .names = options.mesh_dim_names, .groups = {}},
        caller);
    return root;
  }

  void give_groups(std::vector<Group> groups) {
    auto with = *whole;
    with.groups = std::move(groups);
    whole = std::make_shared<const Part>(std::move(with));
  }
};

DeviceMesh::DeviceMesh(const std::string& device_type, const MeshRanks& mesh,
                       const DeviceMeshOptions& options) {
  if (options._init_process_groups) {
    if (!is_initialized()) init_process_group();
    group::compare_calls(default_group(),
                         "DeviceMesh('" + device_type + "', " +
                             (mesh.trouble().empty() ? list(mesh.values()) : mesh.trouble()) +
                             " of shape " + list(mesh.shape()) +
                             ", mesh_dim_names=" + quoted(options.mesh_dim_names) + ")");
  }
  root_ = Root::lay_out(device_type, mesh, options);
  if (options._init_process_groups)
    root_->give_groups(root_->divide(root_->whole->axes, options.backend_override, "DeviceMesh"));
  part_ = root_->whole;
}

DeviceMesh DeviceMesh::from_groups(const std::vector<Group>& groups, const std::string& device_type,
                                   const std::optional<MeshRanks>& mesh,
                                   const std::vector<std::string>& mesh_dim_names) {
  const std::string caller = "DeviceMesh.from_group";
  if (groups.empty()) invalid(caller + ": no group is given");
  for (const auto& group : groups)
    if (!group) invalid(caller + ": a group is None");
  if (groups.size() > 1 && (!mesh || mesh_dim_names.empty()))
    invalid(caller + ": several groups need mesh and mesh_dim_names");
  const auto root = Root::lay_out(device_type, mesh ? *mesh : MeshRanks(groups.front()->ranks()),
                                  {.mesh_dim_names = mesh_dim_names});
  const auto& axes = root->whole->axes;
  if (axes.size() != groups.size())
    invalid(caller + ": the mesh has " + std::to_string(axes.size()) + " dimensions for " +
            std::to_string(groups.size()) + " groups");
  for (std::size_t dim = 0; dim < groups.size(); ++dim) {
    if (!root->whole->coordinate && !groups[dim]->is_member()) continue;
    auto line = root->place({.axes = {axes[dim]}, .names = {}, .groups = {}}, caller)->ranks;
    if (!root->whole->coordinate) line.clear();
    // Groups of a mesh are sorted unless it preserves its order; a one-dimensional mesh has its
    // group's order.
    auto same = groups[dim]->ranks();
    auto sorted = line;
    std::sort(sorted.begin(), sorted.end());
    if (groups.size() > 1) std::sort(same.begin(), same.end());
    if ((groups.size() > 1 ? sorted : line) != same)
      invalid(caller + ": along dimension " + std::to_string(dim) + " rank " +
              std::to_string(root->rank) + " stands in " + list(line) +
              " of the mesh, and the group has ranks " + list(groups[dim]->ranks()));
  }
  root->give_groups(groups);
  return {root, root->whole};
}

const std::string& DeviceMesh::device_type() const { return root_->device_type; }
bool DeviceMesh::preserve_rank_order() const { return root_->preserve_rank_order; }

at::Tensor DeviceMesh::mesh() const {
  auto tensor = at::empty({static_cast<std::int64_t>(part_->ranks.size())}, at::kInt);
  std::copy(part_->ranks.begin(), part_->ranks.end(), tensor.mutable_data_ptr<int>());
  return tensor.view(shape());
}

int DeviceMesh::ndim() const { return static_cast<int>(part_->shape.size()); }
std::vector<std::int64_t> DeviceMesh::shape() const {
  return {part_->shape.begin(), part_->shape.end()};
}

std::int64_t DeviceMesh::size(std::optional<int> mesh_dim) const {
  if (!mesh_dim) return static_cast<std::int64_t>(part_->ranks.size());
  return part_->shape[number_of(*mesh_dim, "size")];
}

const std::vector<std::string>& DeviceMesh::mesh_dim_names() const { return part_->names; }

std::size_t DeviceMesh::number_of(int number, std::string_view caller) const {
  if (number < -ndim() || number >= ndim())
    invalid("DeviceMesh." + std::string(caller) + ": there is no dimension " +
            std::to_string(number) + "; the mesh has " + std::to_string(ndim()));
  return static_cast<std::size_t>(number < 0 ? number + ndim() : number);
}

std::size_t DeviceMesh::number_of(const std::string& name, std::string_view caller) const {
  const auto& names = part_->names;
  const auto at = std::find(names.begin(), names.end(), name);
  if (at == names.end())
    invalid(
        "DeviceMesh." + std::string(caller) + ": there is no dimension '" + name + "'; " +
        (names.empty() ? std::string("the mesh has no names") : "the names are " + quoted(names)));
  return static_cast<std::size_t>(at - names.begin());
}

std::pair<std::shared_ptr<const DeviceMesh::Part>, std::size_t> DeviceMesh::find(
    const Dimension& dimension, std::string_view caller) const {
  if (const auto* number = std::get_if<int>(&dimension.which_))
    return {part_, number_of(*number, caller)};
  if (const auto* name = std::get_if<std::string>(&dimension.which_)) {
    const auto& names = part_->names;
    if (std::find(names.begin(), names.end(), *name) == names.end())
      if (const auto flat = root_->flattened_as(*name)) return {flat, 0};
    return {part_, number_of(*name, caller)};
  }
  if (ndim() != 1)
    invalid("DeviceMesh." + std::string(caller) + ": say which of the " + std::to_string(ndim()) +
            " dimensions is meant");
  return {part_, 0};
}

Group DeviceMesh::get_group(const Dimension& mesh_dim) const {
  const auto [part, dim] = find(mesh_dim, "get_group");
  if (part->groups.empty())
    invalid(
        "DeviceMesh.get_group: the mesh was made without groups (_init_process_groups, "
        "_init_backend), or read from a pickle where no "
        "groups have its names");
  return part->groups[dim];
}

std::vector<Group> DeviceMesh::get_all_groups() const {
  std::vector<Group> all;
  for (int dim = 0; dim < ndim(); ++dim) all.push_back(get_group(dim));
  return all;
}

int DeviceMesh::get_rank() const { return root_->rank; }

int DeviceMesh::get_local_rank(const Dimension& mesh_dim) const {
  const auto [part, dim] = find(mesh_dim, "get_local_rank");
  if (!part->coordinate)
    invalid("DeviceMesh.get_local_rank: rank " + std::to_string(root_->rank) +
            " is not in the mesh");
  return part->groups.empty() ? (*part->coordinate)[dim] : part->groups[dim]->rank();
}

std::optional<std::vector<int>> DeviceMesh::get_coordinate() const { return part_->coordinate; }

DeviceMesh DeviceMesh::slice(const std::vector<std::string>& names) const {
  const std::string caller = "DeviceMesh.slice";
  if (names.empty()) invalid(caller + ": no name is given");
  if (names == part_->names) return *this;
  Part part{.axes = {}, .names = names, .groups = {}};
  for (const auto& name : names) {
    if (std::count(names.begin(), names.end(), name) > 1)
      invalid(caller + ": '" + name + "' is named twice");
    const auto& own = part_->names;
    const bool is_own = std::find(own.begin(), own.end(), name) != own.end();
    const auto flat =
        !is_own && part_->axes == root_->whole->axes ? root_->flattened_as(name) : nullptr;
    const auto& of = flat ? *flat : *part_;
    const auto dim = flat ? 0 : number_of(name, "slice");
    part.axes.push_back(of.axes[dim]);
    if (!of.groups.empty()) part.groups.push_back(of.groups[dim]);
  }
  if (part.groups.size() != names.size()) part.groups.clear();
  return {root_, root_->place(std::move(part), caller)};
}

DeviceMesh DeviceMesh::flatten(const std::optional<std::string>& mesh_dim_name,
                               const DimensionBackend& backend_override) const {
  const std::string caller = "DeviceMesh.flatten";
  std::string name = mesh_dim_name.value_or("");
  if (name.empty())
    for (const auto& one : part_->names) name += (name.empty() ? "" : "_") + one;
  if (part_->names == std::vector{name}) return *this;
  const auto& taken = root_->whole->names;
  if (std::find(taken.begin(), taken.end(), name) != taken.end())
    invalid(caller + ": '" + name + "' is the name of a dimension already");
  Part part{.axes = {mesh::joined(part_->axes)}, .names = {}, .groups = {}};
  if (!name.empty()) part.names = {name};
  if (const auto before = root_->flattened_as(name)) {
    if (before->axes == part.axes) return {root_, before};
    invalid(caller + ": '" + name + "' is the name of other flattened dimensions already");
  }
  if (!part_->groups.empty())
    part.groups = {root_->divide(part.axes.front(), backend_override, caller)};
  const auto placed = root_->place(std::move(part), caller);
  if (!name.empty()) {
    const std::lock_guard lock(root_->mutex);
    root_->flattened[name] = placed;
  }
  return {root_, placed};
}

DeviceMesh DeviceMesh::unflatten(const Dimension& dim, const std::vector<int>& mesh_sizes,
                                 const std::vector<std::string>& mesh_dim_names,
                                 const std::vector<DimensionBackend>& backend_override) const {
  const std::string caller = "DeviceMesh.unflatten";
  const auto* name = std::get_if<std::string>(&dim.which_);
  const auto at = static_cast<std::ptrdiff_t>(name != nullptr ? number_of(*name, "unflatten")
                                                              : find(dim, "unflatten").second);
  const auto& axis = part_->axes[static_cast<std::size_t>(at)];
  if (mesh_sizes.size() != mesh_dim_names.size() || mesh_sizes.empty())
    invalid(caller + ": mesh_sizes " + list(mesh_sizes) + " needs as many mesh_dim_names, not " +
            quoted(mesh_dim_names));
  if (part_->names.empty()) invalid(caller + ": the mesh has no names");
  for (const int extent : mesh_sizes)
    if (extent < 1)
      invalid(caller + ": mesh_sizes " + list(mesh_sizes) + " has a dimension without ranks");
  auto parts = mesh::split(axis, mesh_sizes);
  if (!parts)
    invalid(caller + ": dimension " + std::to_string(at) + " of size " +
            std::to_string(axis.size()) + " cannot be cut into mesh_sizes " + list(mesh_sizes) +
            "; their product must be its size, and each must divide the dimensions that it was "
            "flattened from");
  Part made{.axes = part_->axes, .names = part_->names, .groups = part_->groups};
  const auto replace = [at](auto& values, const auto& with) {
    values.erase(values.begin() + at);
    values.insert(values.begin() + at, with.begin(), with.end());
  };
  replace(made.axes, *parts);
  replace(made.names, mesh_dim_names);
  check_names(made.names, made.names.size(), caller);
  if (!made.groups.empty()) replace(made.groups, root_->divide(*parts, backend_override, caller));
  return {root_, root_->place(std::move(made), caller)};
}

DeviceMesh DeviceMesh::concatenate(const std::vector<DeviceMesh>& meshes) {
  const std::string caller = "DeviceMesh.concatenate";
  if (meshes.empty()) invalid(caller + ": no mesh is given");
  const auto& root = meshes.front().root_;
  Part made{.axes = {}, .names = {}, .groups = {}};
  for (const auto& each : meshes) {
    if (each.root_->ranks != root->ranks)
      invalid(caller + ": the meshes are parts of different meshes");
    if (each.part_->names.empty()) invalid(caller + ": one of the meshes has no names");
    const auto append = [](auto& to, const auto& from) {
      to.insert(to.end(), from.begin(), from.end());
    };
    append(made.axes, each.part_->axes);
    append(made.names, each.part_->names);
    append(made.groups, each.part_->groups);
  }
  check_names(made.names, made.names.size(), caller);
  if (made.groups.size() != made.axes.size()) made.groups.clear();
  return {root, root->place(std::move(made), caller)};
}

std::vector<DeviceMesh> DeviceMesh::lines(const std::string& mesh_dim_name) const {
  const auto dim = number_of(mesh_dim_name, "lines");
  std::vector<DeviceMesh> all;
  for (auto& ranks : root_->lines(part_->axes[dim], "DeviceMesh.lines")) {
    const auto root = Root::lay_out(root_->device_type, MeshRanks(ranks),
                                    {.mesh_dim_names = {mesh_dim_name},
                                     ._init_process_groups = false,
                                     .preserve_rank_order = root_->preserve_rank_order,
                                     ._rank = root_->rank});
    if (root->whole->coordinate && !part_->groups.empty()) root->give_groups({part_->groups[dim]});
    all.push_back({root, root->whole});
  }
  return all;
}

DeviceMesh DeviceMesh::root() const { return {root_, root_->whole}; }

std::map<std::string, DeviceMesh> DeviceMesh::flattened() const {
  const std::lock_guard lock(root_->mutex);
  std::map<std::string, DeviceMesh> all;
  for (const auto& [name, part] : root_->flattened) all.emplace(name, DeviceMesh(root_, part));
  return all;
}

void DeviceMesh::abort() const {
  if (part_ != root_->whole)
    invalid("DeviceMesh.abort: this mesh is a part of another; call it on the root mesh");
  std::set<Group> groups(part_->groups.begin(), part_->groups.end());
  for (const auto& [name, flat] : flattened())
    groups.insert(flat.part_->groups.begin(), flat.part_->groups.end());
  for (const auto& group : groups)
    if (group->is_member()) abort_process_group(group, "DeviceMesh.abort was called");
}

DeviceMeshDescription DeviceMesh::describe() const {
  const auto told = [](const Part& part) {
    DeviceMeshDescription::Part out{.axes = part.axes, .names = part.names, .group_names = {}};
    for (const auto& group : part.groups) out.group_names.push_back(group->name());
    return out;
  };
  DeviceMeshDescription out{.device_type = root_->device_type,
                            .ranks = root_->ranks,
                            .preserve_rank_order = root_->preserve_rank_order,
                            .rank = root_->rank,
                            .root = told(*root_->whole),
                            .flattened = {},
                            .part = told(*part_)};
  for (const auto& [name, flat] : flattened()) out.flattened.emplace(name, told(*flat.part_));
  return out;
}

DeviceMesh DeviceMesh::from_description(const DeviceMeshDescription& description) {
  const auto scope = World::hold_current();
  const int rank = is_initialized() ? default_group()->rank() : description.rank;
  const auto root = std::make_shared<Root>(description.device_type, description.ranks,
                                           description.preserve_rank_order, rank);
  const auto found = [&](const DeviceMeshDescription::Part& told) {
    Part part{.axes = told.axes, .names = told.names, .groups = {}};
    for (const auto& name : told.group_names)
      if (auto group = scope->find(name)) part.groups.push_back(std::move(group));
    if (part.groups.size() != part.axes.size()) part.groups.clear();
    return root->place(std::move(part), "DeviceMesh");
  };
  root->whole = found(description.root);
  for (const auto& [name, told] : description.flattened) root->flattened[name] = found(told);
  if (description.part.axes == description.root.axes &&
      description.part.names == description.root.names)
    return {root, root->whole};
  return {root, found(description.part)};
}

DeviceMesh::Scope::Scope(const DeviceMesh& mesh) { scopes.push_back(mesh); }
DeviceMesh::Scope::~Scope() { scopes.pop_back(); }

DeviceMesh DeviceMesh::current() {
  if (scopes.empty()) invalid("DeviceMesh::current: this thread is in the scope of no mesh");
  return scopes.back();
}

bool operator==(const DeviceMesh& a, const DeviceMesh& b) {
  return a.root_->ranks == b.root_->ranks && a.part_->axes == b.part_->axes &&
         a.part_->names == b.part_->names && a.root_->device_type == b.root_->device_type &&
         a.root_->preserve_rank_order == b.root_->preserve_rank_order;
}

DeviceMesh init_device_mesh(const std::string& device_type, const std::vector<int>& mesh_shape,
                            const InitDeviceMeshOptions& options) {
  const std::string caller = "init_device_mesh";
  if (!is_initialized()) init_process_group();
  const auto world = default_group();
  group::compare_calls(world, "init_device_mesh('" + device_type +
                                  "', mesh_shape=" + list(mesh_shape) +
                                  ", mesh_dim_names=" + quoted(options.mesh_dim_names) + ")");
  check_device(device_type, caller);
  check_names(options.mesh_dim_names, mesh_shape.size(), caller);
  for (const int extent : mesh_shape)
    if (extent < 1)
      invalid(caller + ": mesh_shape " + list(mesh_shape) + " has a dimension without ranks");
  std::int64_t ranks = 1;
  for (const int extent : mesh_shape)
    ranks = std::min<std::int64_t>(ranks * extent, std::int64_t{1} << 31);
  if (mesh_shape.empty() || ranks != world->size())
    invalid(caller + ": mesh_shape " + list(mesh_shape) + " holds " + std::to_string(ranks) +
            " ranks; the default group has " + std::to_string(world->size()));
  std::vector<int> all(static_cast<std::size_t>(world->size()));
  std::iota(all.begin(), all.end(), 0);
  return DeviceMesh(
      device_type, MeshRanks(std::move(all), mesh_shape),
      {.mesh_dim_names = options.mesh_dim_names, .backend_override = options.backend_override});
}

}  // namespace muster
