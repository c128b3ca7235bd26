#include "muster/mesh/device_mesh.h"

#include <ATen/ops/empty.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>

#include "muster/group/errors.h"
#include "muster/group/exchange.h"
#include "muster/group/init.h"
#include "muster/group/rank_list.h"
#include "muster/group/subgroups.h"

namespace muster {
namespace {

using group::invalid;
using group::list;

std::string quoted(const std::vector<std::string>& names) {
  std::string out = "(";
  for (const auto& name : names) out += (out.size() > 1 ? ", '" : "'") + name + "'";
  return out + ")";
}

int product(const std::vector<int>& shape) { return std::accumulate(shape.begin(), shape.end(), 1, std::multiplies<>()); }

std::vector<int> row_major_strides(const std::vector<int>& shape) {
  std::vector<int> strides(shape.size(), 1);
  for (std::size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

/// Positions in the array that a walk over `dims` (in that order, the last quickest) visits from `start`.
std::vector<int> walk(const std::vector<int>& shape, const std::vector<int>& dims, int start) {
  const auto strides = row_major_strides(shape);
  std::vector<int> positions{start};
  for (const int dim : dims) {
    std::vector<int> next;
    for (const int position : positions)
      for (int i = 0; i < shape[static_cast<std::size_t>(dim)]; ++i) next.push_back(position + i * strides[static_cast<std::size_t>(dim)]);
    positions = std::move(next);
  }
  return positions;
}

std::vector<int> coordinate_of(const std::vector<int>& shape, int position) {
  std::vector<int> coordinate;
  for (const int stride : row_major_strides(shape)) {
    coordinate.push_back(position / stride);
    position %= stride;
  }
  return coordinate;
}

/// Where the walks over `dims` start: one for each position along all other dimensions.
std::vector<int> starts_of(const std::vector<int>& shape, const std::vector<int>& dims) {
  std::vector<int> others;
  for (int dim = 0; dim < static_cast<int>(shape.size()); ++dim)
    if (std::find(dims.begin(), dims.end(), dim) == dims.end()) others.push_back(dim);
  return walk(shape, others, 0);
}

void check_device(const std::string& device_type, const std::string& caller) {
  try {
    const c10::Device device(device_type);
    if (!device.has_index()) return;
  } catch (const std::exception&) {
    // the message below says more than torch's
  }
  invalid(caller + ": '" + device_type + "' is no kind of device; give 'cpu' or 'cuda', without an index");
}

void check_names(const std::vector<std::string>& names, std::size_t dimensions, const std::string& caller) {
  if (names.empty()) return;
  if (names.size() != dimensions)
    invalid(caller + ": mesh_dim_names " + quoted(names) + " has " + std::to_string(names.size()) + " names for " +
            std::to_string(dimensions) + " dimensions");
  auto sorted = names;
  std::sort(sorted.begin(), sorted.end());
  if (const auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end())
    invalid(caller + ": mesh_dim_names " + quoted(names) + " has '" + *twice + "' twice; the names must differ");
}

void check_ranks(const MeshRanks& mesh, int world_size, const std::string& caller) {
  if (!mesh.trouble().empty()) invalid(caller + ": " + mesh.trouble());
  if (mesh.values().empty()) invalid(caller + ": the mesh holds no rank");
  auto sorted = mesh.values();
  std::sort(sorted.begin(), sorted.end());
  if (sorted.front() < 0 || sorted.back() >= world_size)
    invalid(caller + ": the mesh holds rank " + std::to_string(sorted.front() < 0 ? sorted.front() : sorted.back()) +
            "; the ranks of the default group are 0 to " + std::to_string(world_size - 1));
  if (const auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end())
    invalid(caller + ": the mesh holds rank " + std::to_string(*twice) + " twice");
}

thread_local std::vector<DeviceMesh> scopes;

}  // namespace

MeshRanks::MeshRanks(const at::Tensor& ranks) {
  if (!ranks.defined() || c10::isFloatingType(ranks.scalar_type()) || c10::isComplexType(ranks.scalar_type()) ||
      ranks.scalar_type() == at::kBool) {
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
    if (trouble_.empty() && part.shape_ != parts.begin()->shape_) trouble_ = "the lists of a mesh must all be of one length";
    values_.insert(values_.end(), part.values_.begin(), part.values_.end());
  }
  shape_.push_back(static_cast<int>(parts.size()));
  if (parts.size() > 0) shape_.insert(shape_.end(), parts.begin()->shape_.begin(), parts.begin()->shape_.end());
}

MeshRanks::MeshRanks(const std::vector<int>& ranks) : values_(ranks), shape_{static_cast<int>(ranks.size())} {}

MeshRanks::MeshRanks(const std::vector<std::vector<int>>& rows) {
  for (const auto& row : rows) {
    if (row.size() != rows.front().size()) trouble_ = "the lists of a mesh must all be of one length";
    values_.insert(values_.end(), row.begin(), row.end());
  }
  shape_ = {static_cast<int>(rows.size()), rows.empty() ? 0 : static_cast<int>(rows.front().size())};
}

struct DeviceMesh::State {
  std::string device_type;
  std::vector<int> ranks;
  std::vector<int> shape;
  std::vector<std::string> names;
  std::vector<Group> groups;  // this process's, by dimension; empty without groups
  int rank = -1;
  std::optional<std::vector<int>> coordinate;

  // Of a slice: the mesh that it is of, and its dimensions there.
  std::shared_ptr<const State> root;
  std::vector<int> root_dims;
  // Of a mesh that is no slice: its flattened parts.
  mutable std::mutex mutex;
  mutable std::map<std::string, std::shared_ptr<const State>> flattened;

  void find_itself() {
    const auto at = std::find(ranks.begin(), ranks.end(), rank);
    if (at != ranks.end()) coordinate = coordinate_of(shape, static_cast<int>(at - ranks.begin()));
  }
  /// This process's group among those of all walks over `dims`.
  Group divide(const std::vector<int>& dims, const DimensionBackend& on = {}) const {
    std::vector<std::vector<int>> parts;
    for (const int start : starts_of(shape, dims)) {
      parts.emplace_back();
      for (const int position : walk(shape, dims, start)) parts.back().push_back(ranks[static_cast<std::size_t>(position)]);
    }
    const auto world = default_group();
    if (!on.backend && !on.pg_options) {
      if (parts.size() == 1 && parts.front() == world->ranks()) return world;
      return split_group(world, parts);
    }
    Group mine;
    for (auto& part : parts) {
      auto made = new_group(
          {.ranks = std::move(part), .timeout = world->timeout(), .backend = on.backend, .pg_options = on.pg_options, .sort_ranks = false});
      if (made->is_member() || !mine) mine = std::move(made);
    }
    return mine;
  }
};

std::shared_ptr<DeviceMesh::State> DeviceMesh::lay_out(const std::string& device_type, const MeshRanks& mesh,
                                                       const DeviceMeshOptions& options) {
  const std::string caller = "DeviceMesh";
  const auto world = default_group();
  check_device(device_type, caller);
  check_ranks(mesh, world->size(), caller);
  check_names(options.mesh_dim_names, mesh.shape().size(), caller);
  if (const auto given = options.backend_override.size(); given != 0 && given != mesh.shape().size())
    invalid(caller + ": backend_override is for " + std::to_string(given) + " dimensions, and the mesh has " +
            std::to_string(mesh.shape().size()));
  auto state = std::make_shared<State>();
  state->device_type = device_type;
  state->ranks = mesh.values();
  state->shape = mesh.shape();
  state->names = options.mesh_dim_names;
  state->rank = world->rank();
  state->find_itself();
  return state;
}

DeviceMesh::DeviceMesh(const std::string& device_type, const MeshRanks& mesh, const DeviceMeshOptions& options) {
  if (options._init_process_groups)
    group::compare_calls(default_group(), "DeviceMesh('" + device_type + "', " +
                                              (mesh.trouble().empty() ? list(mesh.values()) : mesh.trouble()) + " of shape " +
                                              list(mesh.shape()) + ", mesh_dim_names=" + quoted(options.mesh_dim_names) + ")");
  auto state = lay_out(device_type, mesh, options);
  if (options._init_process_groups)
    for (int dim = 0; dim < static_cast<int>(state->shape.size()); ++dim)
      state->groups.push_back(state->divide(
          {dim}, options.backend_override.empty() ? DimensionBackend() : options.backend_override[static_cast<std::size_t>(dim)]));
  state_ = std::move(state);
}

DeviceMesh DeviceMesh::from_groups(const std::vector<Group>& groups, const std::string& device_type, const std::optional<MeshRanks>& mesh,
                                   const std::vector<std::string>& mesh_dim_names) {
  const std::string caller = "DeviceMesh.from_group";
  if (groups.empty()) invalid(caller + ": no group is given");
  for (const auto& group : groups)
    if (!group) invalid(caller + ": a group is None");
  if (groups.size() > 1 && (!mesh || mesh_dim_names.empty())) invalid(caller + ": several groups need mesh and mesh_dim_names");
  auto state = lay_out(device_type, mesh ? *mesh : MeshRanks(groups.front()->ranks()), {.mesh_dim_names = mesh_dim_names});
  if (state->shape.size() != groups.size())
    invalid(caller + ": the mesh has " + std::to_string(state->shape.size()) + " dimensions for " + std::to_string(groups.size()) +
            " groups");
  for (std::size_t dim = 0; dim < groups.size(); ++dim) {
    if (!state->coordinate && !groups[dim]->is_member()) continue;
    int start = 0;
    const auto strides = row_major_strides(state->shape);
    for (std::size_t other = 0; other < strides.size() && state->coordinate; ++other)
      if (other != dim) start += (*state->coordinate)[other] * strides[other];
    std::vector<int> line;  // empty where this process is not in the mesh
    for (const int position : state->coordinate ? walk(state->shape, {static_cast<int>(dim)}, start) : std::vector<int>())
      line.push_back(state->ranks[static_cast<std::size_t>(position)]);
    if (line != groups[dim]->ranks())
      invalid(caller + ": along dimension " + std::to_string(dim) + " rank " + std::to_string(state->rank) + " stands in " + list(line) +
              " of the mesh, and the group has ranks " + list(groups[dim]->ranks()));
  }
  state->groups = groups;
  return DeviceMesh(std::shared_ptr<const State>(std::move(state)));
}

const std::string& DeviceMesh::device_type() const { return state_->device_type; }

at::Tensor DeviceMesh::mesh() const {
  auto tensor = at::empty({static_cast<std::int64_t>(state_->ranks.size())}, at::kLong);
  std::copy(state_->ranks.begin(), state_->ranks.end(), tensor.mutable_data_ptr<std::int64_t>());
  return tensor.view(shape());
}

int DeviceMesh::ndim() const { return static_cast<int>(state_->shape.size()); }
std::vector<std::int64_t> DeviceMesh::shape() const { return {state_->shape.begin(), state_->shape.end()}; }

std::int64_t DeviceMesh::size(std::optional<int> mesh_dim) const {
  if (!mesh_dim) return product(state_->shape);
  return state_->shape[static_cast<std::size_t>(number_of(*mesh_dim, "size"))];
}

const std::vector<std::string>& DeviceMesh::mesh_dim_names() const { return state_->names; }

int DeviceMesh::number_of(const Dimension& dimension, std::string_view caller) const {
  const auto what = "DeviceMesh." + std::string(caller) + ": ";
  if (const auto* number = std::get_if<int>(&dimension.which_)) {
    if (*number < 0 || *number >= ndim())
      invalid(what + "there is no dimension " + std::to_string(*number) + "; the mesh has " + std::to_string(ndim()));
    return *number;
  }
  if (const auto* name = std::get_if<std::string>(&dimension.which_)) {
    const auto at = std::find(state_->names.begin(), state_->names.end(), *name);
    if (at == state_->names.end())
      invalid(what + "there is no dimension '" + *name + "'; " +
              (state_->names.empty() ? std::string("the mesh has no names") : "the names are " + quoted(state_->names)));
    return static_cast<int>(at - state_->names.begin());
  }
  if (ndim() != 1) invalid(what + "say which of the " + std::to_string(ndim()) + " dimensions is meant");
  return 0;
}

Group DeviceMesh::get_group(const Dimension& mesh_dim) const {
  const int dim = number_of(mesh_dim, "get_group");
  if (state_->groups.empty()) invalid("DeviceMesh.get_group: the mesh was made without groups (_init_process_groups)");
  return state_->groups[static_cast<std::size_t>(dim)];
}

std::vector<Group> DeviceMesh::get_all_groups() const {
  if (state_->groups.empty()) invalid("DeviceMesh.get_all_groups: the mesh was made without groups (_init_process_groups)");
  return state_->groups;
}

int DeviceMesh::get_rank() const { return state_->rank; }

int DeviceMesh::get_local_rank(const Dimension& mesh_dim) const {
  const int dim = number_of(mesh_dim, "get_local_rank");
  if (!state_->coordinate) invalid("DeviceMesh.get_local_rank: rank " + std::to_string(state_->rank) + " is not in the mesh");
  return (*state_->coordinate)[static_cast<std::size_t>(dim)];
}

std::optional<std::vector<int>> DeviceMesh::get_coordinate() const { return state_->coordinate; }

DeviceMesh DeviceMesh::slice(const std::vector<std::string>& names) const {
  const auto& root = state_->root ? state_->root : state_;
  if (names.size() == 1) {
    const std::lock_guard lock(root->mutex);
    if (const auto at = root->flattened.find(names.front()); at != root->flattened.end()) return DeviceMesh(at->second);
  }
  if (names.empty()) invalid("DeviceMesh.slice: no name is given");
  std::vector<int> dims;
  for (const auto& name : names) {
    dims.push_back(number_of(name, "slice"));
    if (std::count(dims.begin(), dims.end(), dims.back()) > 1) invalid("DeviceMesh.slice: '" + name + "' is named twice");
  }
  auto state = std::make_shared<State>();
  state->device_type = state_->device_type;
  state->names = names;
  state->rank = state_->rank;
  state->root = root;
  // A rank that is not in the mesh sees the first part.
  const auto here = state_->coordinate.value_or(std::vector<int>(state_->shape.size(), 0));
  int start = 0;
  const auto strides = row_major_strides(state_->shape);
  for (std::size_t dim = 0; dim < strides.size(); ++dim) {
    if (std::find(dims.begin(), dims.end(), static_cast<int>(dim)) == dims.end()) start += here[dim] * strides[dim];
  }
  for (const int position : walk(state_->shape, dims, start)) state->ranks.push_back(state_->ranks[static_cast<std::size_t>(position)]);
  for (const int dim : dims) {
    const auto at = static_cast<std::size_t>(dim);
    state->shape.push_back(state_->shape[at]);
    state->root_dims.push_back(state_->root ? state_->root_dims[at] : dim);
    if (!state_->groups.empty()) state->groups.push_back(state_->groups[at]);
  }
  state->find_itself();
  return DeviceMesh(std::shared_ptr<const State>(std::move(state)));
}

DeviceMesh DeviceMesh::flatten(const std::optional<std::string>& mesh_dim_name) const {
  std::string name = mesh_dim_name.value_or("");
  if (name.empty())
    for (const auto& one : state_->names) name += (name.empty() ? "" : "_") + one;
  const auto& root = state_->root ? state_->root : state_;
  auto dims = state_->root_dims;
  if (!state_->root) {
    dims.resize(state_->shape.size());
    std::iota(dims.begin(), dims.end(), 0);
  }
  if (std::find(root->names.begin(), root->names.end(), name) != root->names.end() && dims.size() > 1)
    invalid("DeviceMesh.flatten: '" + name + "' is the name of a dimension already");
  auto state = std::make_shared<State>();
  state->device_type = state_->device_type;
  state->ranks = state_->ranks;
  state->shape = {product(state_->shape)};
  if (!name.empty()) state->names = {name};
  state->rank = state_->rank;
  state->find_itself();
  if (!state_->groups.empty()) state->groups = {dims.size() == 1 ? state_->groups.front() : root->divide(dims)};
  if (!name.empty()) {
    const std::lock_guard lock(root->mutex);
    root->flattened[name] = state;
  }
  return DeviceMesh(std::shared_ptr<const State>(std::move(state)));
}

DeviceMesh::Scope::Scope(const DeviceMesh& mesh) { scopes.push_back(mesh); }
DeviceMesh::Scope::~Scope() { scopes.pop_back(); }

DeviceMesh DeviceMesh::current() {
  if (scopes.empty()) invalid("DeviceMesh::current: this thread is in the scope of no mesh");
  return scopes.back();
}

bool operator==(const DeviceMesh& a, const DeviceMesh& b) {
  return a.state_->ranks == b.state_->ranks && a.state_->shape == b.state_->shape && a.state_->names == b.state_->names &&
         a.state_->device_type == b.state_->device_type;
}

DeviceMesh init_device_mesh(const std::string& device_type, const std::vector<int>& mesh_shape, const InitDeviceMeshOptions& options) {
  const std::string caller = "init_device_mesh";
  if (!is_initialized()) init_process_group();
  const auto world = default_group();
  group::compare_calls(world, "init_device_mesh('" + device_type + "', mesh_shape=" + list(mesh_shape) +
                                  ", mesh_dim_names=" + quoted(options.mesh_dim_names) + ")");
  check_device(device_type, caller);
  check_names(options.mesh_dim_names, mesh_shape.size(), caller);
  for (const int extent : mesh_shape)
    if (extent < 1) invalid(caller + ": mesh_shape " + list(mesh_shape) + " has a dimension without ranks");
  std::int64_t ranks = 1;
  for (const int extent : mesh_shape) ranks = std::min<std::int64_t>(ranks * extent, std::int64_t{1} << 31);
  if (mesh_shape.empty() || ranks != world->size())
    invalid(caller + ": mesh_shape " + list(mesh_shape) + " holds " + std::to_string(ranks) + " ranks; the default group has " +
            std::to_string(world->size()));
  std::vector<int> all(static_cast<std::size_t>(world->size()));
  std::iota(all.begin(), all.end(), 0);
  return DeviceMesh(device_type, MeshRanks(std::move(all), mesh_shape),
                    {.mesh_dim_names = options.mesh_dim_names, .backend_override = options.backend_override});
}

}  // namespace muster
